"""A recogniser behind FastAPI that tells where its time goes: PocketSphinx and two lines of stages.py.

    uvicorn fastapi_app:app --host 127.0.0.1 --port 8000
    curl --data-binary @speech.raw http://127.0.0.1:8000/asr -si | grep -i server-timing

The decoders are those of ../../pocketsphinx/server.py, each in a process of its own; they mark queue and forward.
"""

import os
import sys

from fastapi import FastAPI, HTTPException, Request
from starlette.concurrency import run_in_threadpool

import stages

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "pocketsphinx"))
import server  # noqa: E402  (its directory is known only now)


api = FastAPI()


@api.on_event("startup")
async def load():
    api.state.pool = await run_in_threadpool(server.Pool, int(os.environ.get("WORKERS", "1")))


@api.post("/asr")
async def asr(request: Request):
    body = await request.body()
    try:
        with stages.stage("preprocess"):
            pcm = server.pcm_of(body)
    except server.BadRequest as err:
        raise HTTPException(err.status, str(err)) from err
    text = await run_in_threadpool(request.app.state.pool.decode, pcm)  # it hands the request's record to the thread
    with stages.stage("postprocess"):
        return {"text": text}


app = stages.ASGI(api)
