"""Images that workflows and agents add: their tokens, their way to the trainer, and what is refused."""

import base64
import hashlib
import re
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import openai
import pytest

from agent_session import openai_agent
from fixture_types import Models
from stretto import Context
from stretto.array import Array
from stretto.bus.messages.subjects import Subjects
from stretto.bus.messages.tickets import StoredImage, TrajectoryBundle, WireTrajectory
from stretto.bus.messages.training import RowRef
from stretto.errors import BusError, ConfigError, EngineError, RequestError, RewardError
from stretto.models.images import MAX_FILE_BYTES, decode
from stretto.models.images import file_of as png_of
from stretto.models.tokenizer import ByteTokenizer
from stretto.models.vision import Vision
from stretto.testing import FakeSession
from stretto.tools import ToolResult
from stretto.user_code.environment import with_files
from stretto.workers.images import RolloutImages, TicketImages
from stretto.workers.training.batch_store import BatchStore
from stretto.workflow import Answer, Prompt, Score, Trajectory
from stretto_multi_turn import MultiTurn, MultiTurnConfig
from stretto_tool_use import ToolUse, ToolUseConfig
from vision_models import ARCHITECTURES, PLACE, picture

CONTEXT = Context(run="r", name="n", seed=1)


def file_of(seed: int, width: int = 20, height: int = 14) -> bytes:
    return png_of(picture(seed, width, height))


def name_of(file: bytes) -> str:
    return hashlib.sha256(file).hexdigest()


@contextmanager
def ticket(folder: Path) -> Generator[tuple[Vision, TicketImages]]:
    vision = Vision(str(folder))
    with RolloutImages(cast("Any", None), vision).ticket() as images:
        yield vision, images


def row_of(prompt: Any, *files: bytes) -> dict[str, Any]:
    return {"prompt": prompt, "images": [{"bytes": file, "path": None} for file in files]}


# ---------------------------------------------------------------------------------- conversations


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_added_images_are_read_in_their_turn_and_nothing_is_tokenised_again(
    vision_models: Models, architecture: str, chat: bool
) -> None:
    files = [file_of(seed, 20 + 8 * seed) for seed in range(4)]
    names = [name_of(file) for file in files]
    place = "<image>" if chat else PLACE[architecture]
    with ticket(vision_models(architecture)) as (vision, images):
        text = f"{place} what?"
        prompt = [{"role": "user", "content": text}] if chat else text
        row_ids = await images.encode_row(row_of(prompt, files[0]))
        session = FakeSession(["one", "two"], tokenizer=vision.tokenizer, images=images)
        conversation = session.conversation(prompt)
        await conversation.reply()
        assert session.generated[0].prompt_ids.tolist() == row_ids.tolist()
        more = f"and {place} or {place}?"
        conversation.add({"role": "user", "content": more} if chat else more, images=files[1:3])
        await conversation.reply()
        last = f"{place}unanswered"
        conversation.add({"role": "user", "content": last} if chat else last, images=files[3:])
        [trajectory] = conversation.trajectories(Score(1.0))
        first, second = session.generated
        head = [*first.prompt_ids.tolist(), *first.answer.tokens.tolist()]
        assert second.prompt_ids.tolist()[: len(head)] == head
        assert trajectory.tokens.tolist() == [*second.prompt_ids.tolist(), *second.answer.tokens.tolist()]
        assert trajectory.images == names[:3]
        seen = vision.alone(*map(decode, files[:3]))
        assert vision.count(trajectory.tokens) == vision.count(seen.ids)
        await images.check(trajectory)
        if chat:
            history = cast("list[Any]", conversation.history)
            shown = [part.get("sha256", part.get("text")) for part in history[2]["content"]]
            assert shown == ["and ", names[1], " or ", names[2], "?"]


async def test_a_split_begins_with_all_images_of_the_history(vision_models: Models) -> None:
    with ticket(vision_models("llava")) as (vision, images):
        prompt = [{"role": "user", "content": "<image>x"}]
        await images.encode_row(row_of(prompt, file_of(0)))
        session = FakeSession(["one", "two"], tokenizer=vision.tokenizer, images=images)
        conversation = session.conversation(prompt)
        await conversation.reply()
        cast("list[Any]", conversation.history)[-1] = {"role": "assistant", "content": "changed"}
        conversation.add({"role": "user", "content": [{"type": "image"}]}, images=[file_of(1)])
        await conversation.reply()
        made = conversation.trajectories(Score(1.0))
        names = [name_of(file_of(seed)) for seed in range(2)]
        assert [each.images for each in made] == [names[:1], names]
        for each in made:
            await images.check(each)


async def test_what_cannot_be_added_is_one_clear_error(
    vision_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ticket(vision_models("llava")) as (vision, images):
        prompt = [{"role": "user", "content": "<image>x"}]
        await images.encode_row(row_of(prompt, file_of(0)))
        session = FakeSession(["a"], tokenizer=vision.tokenizer, images=images)
        with pytest.raises(ConfigError, match="the messages have 1 images and 0 places"):
            session.conversation([{"role": "user", "content": "x"}])
        conversation = session.conversation(prompt)
        await conversation.reply()
        for content, files in (("x", [file_of(1)]), ("<image>" * 2, [file_of(1)]), ([{"type": "image"}], [])):
            with pytest.raises(ConfigError, match=r"the messages have [01] images and [012] places"):
                conversation.add({"role": "user", "content": content}, images=files)
        for content, reason in (
            ("a text with <image>", "a text has 1 images and 2 places"),
            ([{"type": "image", "sha256": "0" * 64}], "this ticket has no image '0000"),
        ):
            broken = session.conversation(prompt)
            broken.add({"role": "user", "content": content})
            with pytest.raises((ConfigError, RequestError), match=reason):
                await broken.reply()
        conversation.add({"role": "user", "content": "<image>"}, images=[b"no image"])
        with pytest.raises(ConfigError, match="cannot identify image file"):
            await conversation.reply()
        with pytest.raises(RequestError, match="an image has 33554433 bytes"):
            images.add([bytes(MAX_FILE_BYTES + 1)])
        monkeypatch.setattr("stretto.workers.images._TICKET_BYTES", 2000)
        with pytest.raises(RequestError, match="more than 2000 bytes together"):
            images.add([bytes(1000), bytes(1001)])
    text = FakeSession(["a"]).conversation("x")
    with pytest.raises(RequestError, match="the run's model reads no images"):
        text.add("y", images=[file_of(0)])


async def test_a_trajectory_with_other_image_tokens_than_its_images_is_refused(vision_models: Models) -> None:
    with ticket(vision_models("qwen2_5_vl")) as (vision, images):
        prompt = [{"role": "user", "content": "<image>x"}]
        ids = await images.encode_row(row_of(prompt, file_of(0)))
        [large] = images.add([file_of(1, 60, 40)])

        def trajectory(named: list[str] | None, *sampled: int) -> Trajectory:
            tokens, zeros = np.array([2, *sampled], np.int32), np.zeros(1 + len(sampled), np.int32)
            answer = Answer(tokens, zeros.astype(np.float32), zeros, "stop", "", "inference-0")
            return replace(Trajectory.of(ids, answer, Score(1.0)), images=named)

        await images.check(trajectory(None))
        await images.check(trajectory([name_of(file_of(0))]))
        for wrong, whose in (
            (trajectory(None, vision.image_token), "the row's"),
            (trajectory([]), "its"),
            (trajectory([large]), "its"),
        ):
            with pytest.raises(EngineError, match=f"a trajectory has .* and {whose} images make"):
                await images.check(wrong)


# ------------------------------------------------------------------------- environments and tools


async def played(workflow: Any, vision: Vision, images: TicketImages, *said: str, **code: Any) -> Trajectory:
    """What a workflow makes of a text without images, if the policy says this in its turns."""
    prompt: Any = [{"role": "user", "content": "x"}]
    await images.encode_row({"prompt": prompt})
    session: Any = FakeSession([*said], tokenizer=vision.tokenizer, images=images, size=1, **code)
    [made] = await workflow.run(Prompt({"prompt": prompt}, np.zeros(1, np.int32)), session)
    await images.check(made)
    return made


MULTI_TURN = MultiTurn(MultiTurnConfig(use="multi_turn", environment="x.py:x"), CONTEXT)


async def test_an_environment_and_a_tool_add_images(vision_models: Models) -> None:
    with ticket(vision_models("llava")) as (vision, images):
        seen: list[Any] = []

        def look(messages: Any, turn: int, **_: Any) -> Any:
            seen.append(messages)
            return {"feedback": "see <image>", "images": [picture(turn)]} if turn < 3 else None

        made = await played(MULTI_TURN, vision, images, "a", environment=look)
        assert made.images == [name_of(file_of(1)), name_of(file_of(2))]
        shown = {"type": "image", "sha256": name_of(file_of(1))}
        assert seen[2][2]["content"] == [{"type": "text", "text": "see "}, shown]

        def screenshot() -> ToolResult:
            return ToolResult({"page": 1}, [picture(7), file_of(8)])

        call = '<tool_call>{"name": "screenshot", "arguments": {}}</tool_call>'
        tools = ToolUse(ToolUseConfig(use="tool_use"), CONTEXT)
        made = await played(tools, vision, images, call, "b", tools=[screenshot])
        assert made.images == [name_of(file_of(7)), name_of(file_of(8))]
        assert "{'page': 1}" in vision.tokenizer.decode(made.tokens)


async def test_the_environment_of_the_page_shows_what_the_policy_named(vision_models: Models) -> None:
    page = (Path(__file__).parents[2] / "docs" / "workflows.md").read_text()
    [code] = re.findall(r"```python\n(# draw\.py\n.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)

    def draw(completion: str, turn: int, **_: Any) -> Any:
        return names["draw"](completion, turn)

    with ticket(vision_models("qwen2_5_vl")) as (vision, images):
        made = await played(MULTI_TURN, vision, images, "red", "yes", environment=draw)
        assert made.score.reward == 1
        [file] = images.files(list(made.images or []))
        assert decode(file).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        ("a.png", "expected a list of images, found str 'a.png'"),
        (["/no/a.png"], "no such file: '/no/a.png'"),
        ([3], "expected a path, .* found int '3'"),
        ([bytes(2**24)] * 3, "images have 50331648 bytes together"),
    ],
)
def test_an_environments_images_that_cannot_be_used_fail_its_ticket(images: Any, reason: str) -> None:
    with pytest.raises(RewardError, match=f"returned `images` that cannot be used: {reason}"):
        with_files({"feedback": "<image>", "images": images})


# ------------------------------------------------------------------------------------------ agents


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


async def test_an_agent_sends_images_in_data_urls(vision_models: Models) -> None:
    """Each API has its form. A chat that continues has its images again, and its ids continue; an image that
    cannot be read is an error of that call alone."""
    files = [file_of(0), file_of(1), file_of(2, 400, 300)]
    with ticket(vision_models("llava")) as (vision, images):
        await images.encode_row({"prompt": "x"})
        session = FakeSession(["ok"], tokenizer=vision.tokenizer, images=images)
        async with openai_agent(session, max_retries=0) as (client, recorder):

            def user(*urls: str) -> Any:
                parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
                return {"role": "user", "content": [{"type": "text", "text": "see"}, *parts]}

            create = client.chat.completions.create
            chat = [user(data_url(files[0]))]
            answer = await create(model="", messages=chat)
            chat += [answer.choices[0].message, user(*map(data_url, files[1:]))]
            for url, reason in (
                ("https://x.org/a.png", "'https://x.org/a.png' is not fetched; send the image in a data URL"),
                ("file:///etc/passwd", "is not fetched"),
                ("data:image/png;base64,a%", "the data URL cannot be read"),
                ("data:image/png,abc", "it is not in base64"),
                (data_url(b"no image"), "cannot identify image file"),
            ):
                with pytest.raises(openai.BadRequestError, match=re.escape(reason)):
                    await create(model="", messages=[user(url)])
            await create(model="", messages=chat)
            content: Any = [{"type": "input_image", "image_url": data_url(files[0])}]
            await client.responses.create(model="", input=[{"role": "user", "content": content}])
        made = recorder.trajectories(Score(1.0))
        names = [name_of(file) for file in files]
        assert [each.images for each in made] == [names, names[:1]]
        for each in made:
            await images.check(each)
    async with openai_agent(FakeSession(["ok"], tokenizer=ByteTokenizer()), max_retries=0) as (client, _):
        with pytest.raises(openai.BadRequestError, match="the policy reads no images"):
            await client.chat.completions.create(model="", messages=chat)


# ---------------------------------------------------------------------------------------- trainers


class Log:
    """A store with one bundle, and images that it says have these names."""

    def __init__(self, bundle: TrajectoryBundle, images: dict[str, bytes]) -> None:
        self.bundle = bundle
        self.images = images
        self.reads: list[str] = []

    async def read_some(
        self, stream: str, subject: str, sequences: Collection[int], kind: Any
    ) -> dict[int, TrajectoryBundle]:
        return dict.fromkeys(sequences, self.bundle)

    async def read_newest(self, stream: str, subject: str, kind: Any) -> StoredImage:
        digest = subject.rpartition(".")[2]
        self.reads.append(digest)
        return StoredImage(self.images[digest])


async def test_a_trainer_makes_the_arrays_of_images_that_a_trajectory_names(vision_models: Models) -> None:
    vision = Vision(str(vision_models("llava")))
    files = [file_of(seed) for seed in range(3)]
    names = [name_of(file) for file in files]

    def trajectory(index: int, images: Sequence[str | int] | None, places: int) -> WireTrajectory:
        count = 4 * places + 4
        return WireTrajectory(
            id=f"1/1/{index}",
            tokens=Array.of([5] * 4 + [vision.image_token] * 4 * places, np.int32),
            loss_mask=Array.of(np.arange(count) < 4, np.bool_),
            logprobs=Array.of(np.zeros(count), np.float32),
            versions=Array.of(np.zeros(count), np.int32),
            reward=0.0,
            metrics={},
            finish="stop",
            engine="inference-0",
            sample=index,
            images=None if images is None else tuple(images),
        )

    async def media_of(*wires: WireTrajectory, **lies: bytes) -> tuple[list[Any], list[str]]:
        """Media of trajectories whose row has the first file, and names of the images that were read."""
        log = Log(TrajectoryBundle(1, 1, 0, wires), {**dict(zip(names, files, strict=True)), **lies})
        context: Any = SimpleNamespace(bus=SimpleNamespace(store=log), names=Subjects("r"))
        placement: Any = SimpleNamespace(graph=SimpleNamespace(samples=True, source=None, writers={}))
        store: Any = BatchStore(context, placement, {})
        store._vision, store._dataset = vision, [row_of("<image>", files[0])]
        refs = tuple(RowRef(each.id, 1, index, 1, len(each.tokens)) for index, each in enumerate(wires))
        await store.begin(0, refs)
        batch = await store.batch(range(len(refs)), (), media=True)
        return list(batch.media or []), log.reads

    lists: list[tuple[str | int, ...] | None] = [None, (0, names[1], names[2]), (names[1],), (names[1],), ()]
    expected = [[0], [0, 1, 2], [1], [1], list[int]()]
    wires = [trajectory(i, *pair) for i, pair in enumerate(zip(lists, map(len, expected), strict=True))]
    found, reads = await media_of(*wires)
    for media, indices in zip(found, expected, strict=True):
        pixels = [decode(files[index]) for index in indices]
        assert bool(media) == bool(pixels)
        if pixels:
            np.testing.assert_array_equal(media["pixel_values"], vision.alone(*pixels).media["pixel_values"])
    assert sorted(reads) == sorted(names[1:])  # each once
    with pytest.raises(BusError, match="is another image than its name says"):
        await media_of(trajectory(0, [names[1]], 1), **{names[1]: files[2]})
    with pytest.raises(ConfigError, match="1/1/0 has 4 image tokens, and its images make 8"):
        await media_of(trajectory(0, names[1:], 1))
    with pytest.raises(ConfigError, match="a sample names its image 1, and the row has 1"):
        await media_of(trajectory(0, [0, 1], 2))
