"""Tells a proxy, a browser or a trace where a request's time went.

A handler marks the stages of its work; header() makes one Server-Timing value of them:

    import stages

    def handle(body):
        stages.start()
        with stages.stage("preprocess"):
            features = extract(body)
        with stages.stage("queue"):
            slot = slots.get()
        with stages.stage("forward", seq=len(features)) as told:
            out, told["batch"] = slot.run(features)      # parameters may come late
        return out, {"Server-Timing": stages.header()}

The names that weir understands: queue, preprocess, h2d, forward, d2h, postprocess, total. The parameters: batch
(requests that shared the execution), seq (padded length, in frames or tokens), tokens, audio (seconds), bytes and n
(moved by a copy, and number of copies), sync (1: measured with the device synchronised).

A stage that ends in an exception is told too. The same name twice is told twice; the reader adds them up, so do not
nest stages: the inner time would count double.

The record belongs to the current context: one thread, or one asyncio task with the tasks that it starts. A handler
that uses a thread pool passes its context on with contextvars.copy_context().run; stages may be added from several
threads at once. Only the standard library is needed.
"""

import contextlib
import contextvars
import re
import time

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_record = contextvars.ContextVar("stages", default=None)


class _Record:
    def __init__(self):
        self.began = time.perf_counter()
        self.metrics = []  # strings, ready to be joined; list.append needs no lock


def start():
    """Begins the record of a new request, and forgets the stages of the one before it in this context.

    The total counts from here. Without start(), it counts from the first stage.
    """
    _record.set(_Record())


@contextlib.contextmanager
def stage(name, **parameters):
    """Times the body of a with statement as one stage; yields the parameters, to be completed inside."""
    record = _current()
    _check(name)
    began = time.perf_counter()
    try:
        yield parameters
    finally:
        took = time.perf_counter() - began
        record.metrics.append(_metric(name, took, parameters))


def add(name, seconds, **parameters):
    """Adds a stage that was timed elsewhere, as with the device's own events."""
    _check(name)
    _current().metrics.append(_metric(name, seconds, parameters))


def header():
    """Returns the Server-Timing value, total last, and ends the record; "" if nothing was begun."""
    record = _record.get()
    if record is None:
        return ""
    _record.set(None)
    total = time.perf_counter() - record.began
    return ", ".join([*record.metrics, _metric("total", total, {})])


def _current():
    if _record.get() is None:
        start()
    return _record.get()


def _check(token):
    if not _TOKEN.match(token):
        raise ValueError(f"{token!r} cannot stand in a header; use letters, digits, '-' and '_'")


def _metric(name, seconds, parameters):
    # Milliseconds with three decimals, a microsecond: more would be noise.
    parts = [name, f"dur={seconds * 1e3:.3f}"]
    for key, value in parameters.items():
        _check(key)
        parts.append(f"{key}={_number(value)}")
    return ";".join(parts)


def _number(value):
    """Digits and a decimal point only, so that no value needs quotes; True is 1."""
    value = float(value)
    if value == int(value):
        return str(int(value))
    return f"{value:.3f}"
