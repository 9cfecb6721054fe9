"""Images that cannot be read are one clear error for their row, and cost little memory."""

import io
import json
import os
import zlib
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import pytest
from PIL import Image

from fixture_types import Models, Start
from stretto.errors import ConfigError
from stretto.models import images
from vision_models import picture


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
    return stream.getvalue()


def png(width: int, height: int, bits: int, kind: int, data: bytes, **chunks: bytes) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)

    parts = {"IHDR": width.to_bytes(4) + height.to_bytes(4) + bytes([bits, kind, 0, 0, 0]), **chunks}
    parts |= {"IDAT": zlib.compress(data, 9), "IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name.encode(), data) for name, data in parts.items())


def huge(width: int = 20_000, height: int = 20_000) -> bytes:
    """A whole PNG of one bit a pixel, 50 kB in all."""
    return png(width, height, 1, 0, bytes((width // 8 + 1) * height))


FRAMES = [picture(seed) for seed in (1, 2)]
BAD: dict[str, tuple[bytes, str]] = {
    "damaged": (saved(picture(0))[:-60], "trunc|broken|decod|damaged"),
    "cut": (saved(picture(0))[:20], "."),
    "empty": (b"", "cannot identify"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot identify"),
    "huge": (huge(), "400000000 pixels"),
    "large": (huge(6000, 6000), "6000 × 6000 pixels; expected at most 33,554,432"),
    "gif": (saved(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), "2 frames; expected one"),
    "apng": (saved(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), "2 frames; expected one"),
    "webp": (saved(FRAMES[0], "WEBP", save_all=True, append_images=FRAMES[1:]), "2 frames; expected one"),
    "cmyk": (saved(picture(0).convert("CMYK"), "JPEG"), "its colours are CMYK; expected grey or RGB"),
    "deep": (saved(Image.new("I;16", (8, 8))), "its colours are I;16"),
    "tiff": (saved(picture(0), "TIFF"), "cannot identify"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_refused_for_a_reason(kind: str) -> None:
    data, reason = BAD[kind]
    with pytest.raises(images.ImageError, match=reason):
        images.decode(data)
    with pytest.raises(ConfigError, match="column 'image' of row 'r7': what its bytes hold is no image that"):
        images.images_of({"id": "r7", "image": {"bytes": data or b"x", "path": None}})


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "1"])
def test_other_images_are_read(format: str, mode: str) -> None:
    if (format, mode) in {("JPEG", "P"), ("JPEG", "RGBA")}:
        pytest.skip("there is no such file")
    assert images.decode(saved(picture(0).convert(mode), format)).mode == "RGB"


CLEAR = Image.new("RGBA", (2, 1))
"""A transparent pixel, whose colour is black, and a dark grey one."""
CLEAR.putpixel((1, 0), (68, 68, 68, 255))
PALETTED = Image.new("P", (2, 1))
PALETTED.putpalette([0, 0, 0, 0, 68, 68, 68, 255], "RGBA")
PALETTED.putpixel((1, 0), 1)
RGB_BEFORE, GREY_BEFORE = bytes([0, 1, 2, 3, 68, 68, 68]), bytes([0, 1, 68])
TRANSPARENT: dict[str, Any] = {
    "rgba": saved(CLEAR),
    "la": saved(CLEAR.convert("LA")),
    "webp": saved(CLEAR, "WEBP", lossless=True),
    "gif": saved(CLEAR, "GIF"),
    "palette": saved(PALETTED),
    "palette of 1 bit": png(2, 1, 1, 3, bytes([0, 64]), PLTE=bytes([9, 9, 9, 68, 68, 68]), tRNS=b"\0"),
    "rgb": png(2, 1, 8, 2, RGB_BEFORE, tRNS=bytes([0, 1, 0, 2, 0, 3])),
    "rgb of 16 bits": png(2, 1, 16, 2, b"\0" + bytes(range(6)) + b"\x44" * 6, tRNS=bytes(range(6))),
    "grey": png(2, 1, 8, 0, GREY_BEFORE, tRNS=bytes([0, 1])),
    "grey of 1 bit": png(2, 1, 1, 0, bytes([0, 64]), tRNS=bytes(2)),
    "grey of 4 bits": png(2, 1, 4, 0, bytes([0, 0x34]), tRNS=bytes([0, 3])),
    **{f"decoded {mode}": CLEAR.convert(mode) for mode in ("RGBA", "LA", "RGBa")},
    "decoded PA": CLEAR.convert("P").convert("PA"),
    "decoded palette": PALETTED,
    "decoded tRNS": Image.open(io.BytesIO(png(2, 1, 8, 0, GREY_BEFORE, tRNS=bytes([0, 1])))),
    "array": datasets.Image().encode_example(np.asarray(CLEAR)),
}


@pytest.mark.parametrize("kind", TRANSPARENT)
def test_what_is_transparent_lies_on_white(kind: str) -> None:
    image = TRANSPARENT[kind]
    image = {"bytes": image, "path": None} if isinstance(image, bytes) else image
    [of_row], [of_feedback] = images.images_of({"image": image}), images.files_of([image])
    second = bytes([255] * 3 if kind == "grey of 1 bit" else [68] * 3)
    for pixels in (of_row.pixels, images.decode(of_row.file), images.decode(of_feedback)):
        assert (pixels.mode, pixels.tobytes()) == ("RGB", bytes([255] * 3) + second)


def test_half_of_a_colour_is_mixed_with_white() -> None:
    assert images.decode(saved(Image.new("RGBA", (1, 1), (255, 0, 0, 51)))).tobytes() == bytes(
        [255, 204, 204]
    )


def test_a_picture_is_turned_as_its_camera_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert images.decode(saved(picture(0, 20, 14), "JPEG", exif=exif)).size == (14, 20)


def test_a_huge_image_costs_no_memory() -> None:
    process, data = psutil.Process(), BAD["huge"][0]
    before = process.memory_info().rss
    for _ in range(5):
        with pytest.raises(images.ImageError):
            images.decode(data)
    assert process.memory_info().rss - before < 2**26


def test_what_is_no_image_is_one_clear_error(tmp_path: Path) -> None:
    with (tmp_path / "large.png").open("wb") as file:  # it is not read
        file.truncate(images.MAX_FILE_BYTES + 1)
    os.mkfifo(tmp_path / "pipe.png")  # it is not waited for
    rows: list[tuple[dict[str, Any], str]] = [
        ({"images": ["/no/a.png"], "id": "r1"}, "column 'images' of row 'r1': no such file: '/no/a.png'"),
        ({"images": "a.png"}, "column 'images': expected a list of images, found str 'a.png'"),
        ({"images": [3]}, r"column 'images': expected a path, or \{'bytes'.*found int '3'"),
        ({"image": "a", "images": ["b"]}, "and the column 'image' both hold images"),
        ({"image": str(tmp_path / "large.png")}, "large.png' has 33554433 bytes; expected at most 33554432"),
        ({"image": str(tmp_path / "pipe.png")}, r"pipe.png' is not a regular file"),
    ]
    for row, message in rows:
        with pytest.raises(ConfigError, match=message):
            images.images_of(row)


def test_people_read_the_paths_of_images() -> None:
    image = Image.new("RGB", (2, 2))
    row = {"answer": "2", "images": ["/a.png", {"bytes": None, "path": "/b.png"}, {"bytes": b"abc"}, image]}
    named = images.with_names(row)
    assert named == {"answer": "2", "images": ["/a.png", "/b.png", {"bytes": 3}, {"type": "Image"}]}
    assert images.names_in(named) == named["images"]
    assert images.names_in(images.with_names({"image": "/c.png"})) == ["/c.png"]
    assert images.names_in("a row that was cut") == []


@pytest.mark.slow
def test_bad_rows_fail_and_nothing_else_is_lost(start: Start, vision_models: Models, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for number, kind in enumerate([*("good",) * 8, *BAD, "missing"]):
        data = BAD[kind][0] if kind in BAD else saved(picture(number))
        if kind != "missing":
            (tmp_path / f"{number}.png").write_bytes(data)
        rows.append({"id": kind, "prompt": "see <|image_pad|>", "image": f"{number}.png", "answer": "x"})
    (tmp_path / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = start(
        f"model={vision_models('qwen2_5_vl')}",
        f"dataset={{use: jsonl, path: {tmp_path}/seen.jsonl, shuffle: false}}",
        *("training=mock", "inference={use: mock, vocab_size: 90}", "sampling.max_tokens=32"),
        *("algorithm.group_size=2", "queue.max_failures=100", "steps=6"),
    )
    summary = run.assert_completed(6)
    run.assert_audit_is_clean()
    assert summary["ledger"]["failed"] >= len(BAD) + 1, summary["ledger"]
    log = (run.folder / "logs" / "rollout-0.jsonl").read_text()
    assert all(f"of row '{kind}'" in log for kind in [*BAD, "missing"])
    assert "of row 'good'" not in log
