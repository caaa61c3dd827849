"""Tells a proxy, a browser or a trace where a request's time went.

Copy this file beside your server. It needs nothing but the standard library. A handler marks the stages of its work,
and one Server-Timing value comes of them:

    import stages

    app = stages.ASGI(app)                      # FastAPI, Starlette, Quart, LitServe; or stages.WSGI(app) for Flask

    async def transcribe(audio):
        with stages.stage("preprocess"):
            features = extract(audio)
        with stages.stage("queue"):
            await slots.acquire()
        with stages.stage("h2d", **stages.size(features)):
            features = features.to("cuda")
        with stages.stage("forward", batch=1, seq=features.shape[-1]) as told:
            tokens = model(features)
            told["tokens"] = len(tokens)        # parameters may come late
        return text(tokens)

Without the middleware, call start() first and put header() into the answer. stage() is a decorator, too, for functions
and coroutines.

The names that weir understands: queue, preprocess, h2d, forward (or encode, prefill, decode), d2h, postprocess. The
parameters: batch (requests that shared the execution), seq (padded length, in frames or tokens), tokens, audio
(seconds), bytes and n (moved by a copy, and number of copies), sync (1: measured with the device synchronised).

The device. A kernel is launched, not waited for, so the host's clock says little of it. Where PyTorch uses CUDA, the
stages that run on the device are timed by CUDA events on the current stream: nothing is stalled, and the times are read
when the answer is made, if the device has come that far by then (else the host's time counts). configure(sync=True)
waits for the device around those stages instead; configure(sync=f) calls f for it, as for other devices:
torch.mps.synchronize, torch.xpu.synchronize, or lambda: jax.block_until_ready(x).

One execution for several requests: current() in each handler gives its record, and the batch's worker says
stage("forward", batch=len(records), records=records).

Nested stages: the inner time is taken off the outer, so that nothing counts twice. A stage that ends in an exception is
told, too. The record belongs to the current context: one thread, or one asyncio task with the tasks that it starts; a
thread pool needs contextvars.copy_context().run, which Starlette's does. configure(on=False), or WEIR_STAGES=off in the
environment, makes all of it do nothing.
"""

import contextvars
import functools
import inspect
import os
import re
import sys
import time

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_MOST = 64  # stages of one request: more would not fit into a header anyway
_record = contextvars.ContextVar("stages", default=None)
_open = contextvars.ContextVar("open_stage", default=None)
_checked = set()  # names that can stand in a header
_clock = time.perf_counter
_modules = sys.modules

# Stages that run on the device.
DEVICE = {"forward", "encode", "prefill", "decode", "inference", "infer", "predict", "h2d", "d2h", "transfer"}


_on = os.environ.get("WEIR_STAGES", "").lower() not in ("off", "0", "false")
_sync = None  # a function that waits for the device; None: CUDA events


def configure(on=None, sync=None):
    """Switches everything on or off; sync=True waits for CUDA around device stages, sync=f calls f, sync=False is as at first."""
    global _on, _sync
    if on is not None:
        _on = bool(on)
    if sync is True:
        _sync = _synchronize_cuda
    elif sync is not None:
        _sync = sync or None


class Record:
    """The stages of one request. Adding to it needs no lock: list.append is one step."""

    __slots__ = ("began", "stages")

    def __init__(self):
        self.began = _clock()
        self.stages = []  # (name, seconds, parameters, events)

    def value(self, total=True):
        """The Server-Timing value; with the total, if all of the answer is there."""
        parts = [_metric(*one) for one in self.stages[:_MOST]]
        if total:
            parts.append(_metric("total", _clock() - self.began, {}, None))
        return ", ".join(parts)


def start():
    """Begins the record of a new request in this context, and forgets the one before it; returns it."""
    record = Record()
    _record.set(record)
    return record


def current():
    """The record of this context's request; a new one, if there is none."""
    return _record.get() or start()


def header(total=True):
    """Returns the Server-Timing value, total last, and ends the record; "" if nothing was begun."""
    record = _record.get()
    if record is None:
        return ""
    _record.set(None)
    return record.value(total)


def add(name, seconds, **parameters):
    """Adds a stage that was timed elsewhere."""
    for token in (name, *parameters):
        _check(token)
    if _on:
        current().stages.append((name, seconds, parameters, None))


def size(*tensors):
    """The parameters of a copy: bytes and n of tensors or arrays."""
    return {"bytes": sum(t.nbytes for t in tensors), "n": len(tensors)}


class stage:
    """Times the body of a with statement, or a function, as one stage.

    The with statement gives the parameters, to be completed inside. device says whether the stage runs on the device; by
    itself it is what the name says. records are those of all requests that share the execution.
    """

    __slots__ = ("name", "parameters", "records", "device", "began", "inner", "outer", "events")

    def __init__(self, name, records=None, device=None, **parameters):
        if name not in _checked:
            _check(name)
        self.name = name
        self.parameters = parameters
        self.records = records
        self.device = name in DEVICE if device is None else device

    def __enter__(self):
        if not _on:
            self.began = None
            return self.parameters
        self.inner = 0.0
        self.outer = _open.get()
        _open.set(self)
        if self.device:
            self.events = None
            if _sync is not None:
                _sync()
            elif "torch" in _modules:
                self.events = _cuda_event()
        self.began = _clock()
        return self.parameters

    def __exit__(self, *_):
        if self.began is None:
            return False
        parameters, events = self.parameters, None
        if self.device:
            if _sync is not None:
                _sync()
                parameters["sync"] = 1
            elif self.events is not None:
                events = (self.events, _cuda_event())
        took = _clock() - self.began
        outer = self.outer
        _open.set(outer)
        if outer is not None:
            outer.inner += took
        if self.inner:
            took = max(0.0, took - self.inner)
            events = None  # what ran inside is told by itself, so the device's own time would count it twice
        for key in parameters:
            if key not in _checked:
                _check(key)
        if self.records is None:
            (_record.get() or start()).stages.append((self.name, took, parameters, events))
            return False
        for record in self.records:
            record.stages.append((self.name, took, parameters, events))
        return False

    def __call__(self, function):
        """As a decorator: each call is a stage of its own."""
        name, parameters, records, device = self.name, self.parameters, self.records, self.device
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def timed(*args, **kwargs):
                with stage(name, records, device, **parameters):
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def timed(*args, **kwargs):
                with stage(name, records, device, **parameters):
                    return function(*args, **kwargs)

        return timed


def _torch():
    """PyTorch, if this process uses it with CUDA; it is never imported for this."""
    torch = _modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return None
    return torch


def _cuda_event():
    torch = _torch()
    if torch is None:
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _synchronize_cuda():
    torch = _torch()
    if torch is not None:
        torch.cuda.synchronize()


def _check(token):
    if token in _checked:
        return
    if not _TOKEN.match(token):
        raise ValueError(f"{token!r} cannot stand in a header; use letters, digits, '-' and '_'")
    if len(_checked) < 1000:
        _checked.add(token)


def _metric(name, seconds, parameters, events):
    sync = False
    if events is not None and events[1] is not None and events[1].query():
        seconds, sync = events[0].elapsed_time(events[1]) / 1e3, True  # in milliseconds
    # Milliseconds with three decimals, a microsecond: more would be noise.
    text = f"{name};dur={seconds * 1e3:.3f}"
    for key, value in parameters.items():
        text += f";{key}={_number(value)}"
    return text + ";sync=1" if sync and "sync" not in parameters else text


def _number(value):
    """Digits and a decimal point only, so that no value needs quotes; True is 1."""
    value = float(value)
    if value == int(value):
        return str(int(value))
    return f"{value:.3f}"


# --- Middleware ------------------------------------------------------------------------------------------------------


class ASGI:
    """Puts the stages into the answers of an ASGI application.

    They go into the header where the answer is whole when it begins. An answer that is streamed gets them as a trailer,
    where the server can send one (the extension http.response.trailers); else its header tells the stages up to there.
    """

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or not _on:
            return await self.app(scope, receive, send)
        record = start()
        trailers = "http.response.trailers" in (scope.get("extensions") or {})
        held = None  # the answer's beginning, until it is known whether it is whole
        promised = False

        async def tell(message):
            nonlocal held, promised
            kind = message["type"]
            if kind == "http.response.start":
                held = dict(message)
                held["headers"] = [tuple(one) for one in message.get("headers", [])]
                if not _is_stream(held["headers"]):
                    return
                message = {"type": "http.response.body", "more_body": True}  # its reader waits for the head alone
            if held is not None:
                whole = not message.get("more_body", False)
                promised = trailers and not whole and not held.get("trailers")
                if promised:
                    held["trailers"] = True
                    held["headers"].append((b"trailer", b"server-timing"))
                else:
                    value = record.value(total=whole)
                    if value:
                        held["headers"].append((b"server-timing", value.encode("ascii")))
                first, held = held, None
                await send(first)
                if kind == "http.response.start":
                    return
            await send(message)
            if promised and kind == "http.response.body" and not message.get("more_body", False):
                value = record.value().encode("ascii")
                await send({"type": "http.response.trailers", "headers": [(b"server-timing", value)], "more_trailers": False})

        await self.app(scope, receive, tell)


def _is_stream(headers):
    return any(name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


class WSGI:
    """Puts the stages into the header of a WSGI application's answers: those up to where its body begins."""

    def __init__(self, app):
        self.app = app

    def __call__(self, environ, start_response):
        if not _on:
            return self.app(environ, start_response)
        record = start()
        told = []  # the arguments of start_response, until the application has returned

        def later(status, headers, exc_info=None):
            told[:] = [status, headers, exc_info]
            return write

        def begin(total):
            status, headers, exc_info = told
            value = record.value(total)
            start_response(status, headers + [("Server-Timing", value)] if value else headers, *([exc_info] if exc_info else []))

        begun = []

        def write(data):
            raise RuntimeError("write() is not supported with stages.WSGI; return the body")

        body = self.app(environ, later)
        if told:
            begin(total=isinstance(body, (list, tuple)))
            return body
        return _Late(body, begin, begun)


class _Late:
    """The body of an application that calls start_response only when it is read, as generators do."""

    def __init__(self, body, begin, begun):
        self.body, self.iterator, self.begin, self.begun = body, iter(body), begin, begun

    def __iter__(self):
        return self

    def __next__(self):
        try:
            part = next(self.iterator)
        finally:
            if not self.begun:
                self.begun.append(True)
                self.begin(total=False)
        return part

    def close(self):
        close = getattr(self.body, "close", None)
        if close:
            close()
