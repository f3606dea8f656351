"""Routes that load and unload adapters, with vLLM's names: only if the server has a folder from which they may be loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from paged_attn.engine.lora.adapter_files import read_adapter
from paged_attn.server.api.fields.bounds import Closed, Name
from paged_attn.server.api.request_state import state_of
from paged_attn.server.http.errors import ERRORS, ApiError, bad_field, bad_request
from paged_attn.shown import shown

router = APIRouter(responses=ERRORS)


class LoadBody(Closed):
    lora_name: Name = Field(description="what requests call it: their model")
    lora_path: Name = Field(description="its folder, in the server's folder of adapters")


class UnloadBody(Closed):
    lora_name: Name
    lora_int_id: int | None = Field(None, description="of vLLM; means nothing here")


@router.post("/v1/load_lora_adapter")
async def load(request: Request, body: LoadBody) -> Response:
    """Load an adapter, from where requests may name it as their model."""
    state = state_of(request)
    engine = state.llm.thread.refuse_unless_ready()
    if engine.adapters is None:
        raise ApiError(400, "this server has no room for adapters; start it with --max-loras", param="lora_name")
    if body.lora_name in state.settings.names:
        raise bad_field("lora_name", f"{shown(body.lora_name)} is the name of the model itself")
    folder = inside(Path(state.settings.lora_folder or ""), body.lora_path)
    try:
        adapter = await asyncio.to_thread(read_adapter, folder, body.lora_name)  # steps go on meanwhile
    except (ValueError, OSError) as error:
        raise bad_request(ValueError(str(error)), "lora_path") from error
    try:
        await state.llm.thread.ask(lambda engine: engine.load_lora(body.lora_name, adapter))
    except ValueError as error:
        raise bad_request(error, "lora_name") from error
    return JSONResponse({"id": body.lora_name, "object": "model", "loaded": True})


@router.post("/v1/unload_lora_adapter")
async def unload(request: Request, body: UnloadBody) -> Response:
    """Forget an adapter that no request uses."""
    thread = state_of(request).llm.thread
    engine = thread.refuse_unless_ready()
    if engine.adapters is None or body.lora_name not in engine.adapters.loaded:
        raise ApiError(404, f"there is no adapter {shown(body.lora_name)}", param="lora_name", code="model_not_found")
    try:
        await thread.ask(lambda engine: engine.unload_lora(body.lora_name))
    except ValueError as error:
        raise ApiError(409, str(error), param="lora_name", code="adapter_in_use") from error
    return JSONResponse({"id": body.lora_name, "object": "model", "loaded": False})


def inside(folder: Path, path: str) -> Path:
    """The folder that a client means; links are followed before it is asked where that lies. Raises ApiError: 400 for one that is not in
    `folder`, which the message does not tell."""
    try:
        root = folder.resolve(strict=True)
        found = (root / path).resolve()
    except (OSError, ValueError) as error:  # a null byte, a loop of links
        raise bad_field("lora_path", f"{shown(path)} is not a path") from error
    if root == found or root not in found.parents:
        raise bad_field("lora_path", f"{shown(path)} is not in this server's folder of adapters (--lora-folder)")
    return found
