"""The files of a checkpoint, for one trainer: in a shared folder, or in a store that is reached by a URL.
The trainer keeps files from and for a store in a temporary folder of its own."""

import hashlib
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.to_thread
import msgspec
import structlog

from stretto.bus.messages.training import LoadCheckpoint, Save
from stretto.component import Context
from stretto.errors import EngineError
from stretto.models.version_files import RunFolders
from stretto.records.remote_folder import RemoteFolder

log = structlog.get_logger()

_MANIFEST = "manifest.json"


@asynccontextmanager
async def folder_to_load(message: LoadCheckpoint, context: Context) -> AsyncGenerator[str]:
    """Yield a folder with the files of a checkpoint; empty if the message names none."""
    if not _is_url(message.folder):
        yield message.folder
        return
    async with _temporary_folder(context) as folder:
        await anyio.to_thread.run_sync(_download, message, folder)
        yield str(folder)


@asynccontextmanager
async def folder_to_save(message: Save, context: Context, uploaded: dict[str, str]) -> AsyncGenerator[str]:
    """Yield a folder for a checkpoint's files. If a store is named, upload them; `uploaded` gets SHA-256s."""
    if not _is_url(message.folder):
        yield message.folder
        return
    async with _temporary_folder(context) as folder:
        yield str(folder)
        try:
            uploaded |= await anyio.to_thread.run_sync(RemoteFolder(message.folder).upload, folder)
            log.info("checkpoint uploaded", url=message.folder, files=sorted(uploaded))
        except OSError as error:
            raise EngineError(
                f"the checkpoint cannot be uploaded: {error}; the run goes on without it"
            ) from error


def _is_url(place: str) -> bool:
    return "://" in place  # the path of a folder has no two slashes in a row


@asynccontextmanager
async def _temporary_folder(context: Context) -> AsyncGenerator[Path]:
    """Yield a folder that only this user can enter; remove what a killed process of this worker left."""
    folder = RunFolders(context, tempfile.gettempdir()).own("checkpoint")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(message: LoadCheckpoint, folder: Path) -> None:
    remote = RemoteFolder(message.folder)
    try:
        manifest = remote.read(_MANIFEST)
        if hashlib.sha256(manifest).hexdigest() != message.manifest:
            raise OSError(f"{remote.url}/{_MANIFEST} is not the one in the run's folder")
        remote.download(msgspec.json.decode(manifest, type=dict[str, str]), folder)
    except (OSError, msgspec.DecodeError) as error:
        raise EngineError(
            f"the checkpoint cannot be loaded: {error}; to continue from the checkpoint before it, remove "
            f"{remote.url}/{_MANIFEST} and resume"
        ) from error
