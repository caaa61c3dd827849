"""Tests of what stages.py adds to a request; ../../pocketsphinx/test_stages.py tests the header's form."""

import asyncio
import concurrent.futures
import contextvars
import sys
import threading
import time
import types
import unittest
import wsgiref.util
import wsgiref.validate

import stages


def metrics(value):
    """{name: [{parameter: number}]} of a Server-Timing value."""
    out = {}
    for metric in filter(None, value.split(", ")):
        name, *parameters = metric.split(";")
        out.setdefault(name, []).append({k: float(v) for k, v in (p.split("=") for p in parameters)})
    return out


class Case(unittest.TestCase):
    def setUp(self):
        stages.configure(on=True, sync=False)
        stages.start()

    tearDown = setUp


class Stages(Case):
    def test_inner_time_is_taken_off_the_outer(self):
        with stages.stage("preprocess"):
            time.sleep(0.01)
            with stages.stage("queue"):
                time.sleep(0.05)
        told = metrics(stages.header())
        self.assertLess(told["preprocess"][0]["dur"], 40)
        self.assertGreaterEqual(told["queue"][0]["dur"], 49)
        self.assertLessEqual(told["preprocess"][0]["dur"] + told["queue"][0]["dur"], told["total"][0]["dur"] + 0.1)

    def test_decorator_of_functions_and_coroutines(self):
        @stages.stage("preprocess", audio=2.5)
        def one(x):
            return x + 1

        @stages.stage("forward", batch=3)
        async def two(x):
            await asyncio.sleep(0.01)
            return x * 2

        async def both():
            return one(1), await two(4), await two(5)

        stages.start()
        result = asyncio.run(both())
        told = metrics(stages.header())
        self.assertEqual(result, (2, 8, 10))
        self.assertEqual((one.__name__, two.__name__), ("one", "two"))
        self.assertEqual(told["preprocess"][0]["audio"], 2.5)
        self.assertEqual([m["batch"] for m in told["forward"]], [3, 3])
        self.assertGreaterEqual(told["forward"][0]["dur"], 9)

    def test_tasks_and_threads_at_once_do_not_mix(self):
        async def handle(n):
            stages.start()
            with stages.stage("queue"):
                await asyncio.sleep(0.001 * (n % 7))
            loop = asyncio.get_running_loop()

            def work():
                with stages.stage("forward", seq=n):
                    time.sleep(0.001)

            await loop.run_in_executor(pool, contextvars.copy_context().run, work)
            return metrics(stages.header())

        async def all_of_them():
            return await asyncio.gather(*(handle(n) for n in range(1, 60)))

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for n, told in enumerate(asyncio.run(all_of_them()), 1):
                self.assertEqual([m["seq"] for m in told["forward"]], [n])
                self.assertEqual(len(told["queue"]), 1)

    def test_one_execution_for_several_requests(self):
        records = []

        def handle():
            stages.start()
            records.append(stages.current())

        threads = [threading.Thread(target=handle) for _ in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        with stages.stage("forward", batch=len(records), records=records):
            pass
        for record in records:
            self.assertEqual(metrics(record.value())["forward"][0]["batch"], 3)

    def test_off_does_nothing(self):
        stages.configure(on=False)
        with stages.stage("forward", batch=1) as told:
            told["tokens"] = 3
        self.assertEqual(metrics(stages.header(total=False)), {})

    def test_size_of_copies(self):
        self.assertEqual(stages.size(memoryview(b"1234"), memoryview(b"56")), {"bytes": 6, "n": 2})

    def test_parameters_that_would_break_the_header_are_refused_where_they_stand(self):
        with self.assertRaises(ValueError):
            with stages.stage("forward") as told:
                told["a b"] = 1
        with self.assertRaises(ValueError):
            stages.stage("a;b")

    def test_a_long_request_keeps_the_header_short(self):
        for _ in range(1000):
            stages.add("decode", 0.001)
        self.assertLess(len(stages.header()), 8000)


class Event:
    """Stands in for torch.cuda.Event: the device is a clock that the test moves."""

    now = 0.0
    reached = 1e9

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def query(self):
        return self.at <= Event.reached

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class Device(Case):
    def setUp(self):
        super().setUp()
        Event.now, Event.reached = 0.0, 1e9
        self.waits = 0

        def synchronize():
            self.waits += 1

        cuda = types.SimpleNamespace(Event=Event, synchronize=synchronize, is_initialized=lambda: True)
        sys.modules["torch"] = types.SimpleNamespace(cuda=cuda)
        self.addCleanup(sys.modules.pop, "torch")

    def test_events_time_the_device_and_stall_nothing(self):
        with stages.stage("forward", batch=2):
            Event.now += 0.25
        with stages.stage("preprocess"):
            Event.now += 5
        told = metrics(stages.header())
        self.assertEqual(told["forward"][0], {"dur": 250, "batch": 2, "sync": 1})
        self.assertNotIn("sync", told["preprocess"][0])
        self.assertEqual(self.waits, 0)

    def test_a_device_that_is_not_there_yet_is_not_waited_for(self):
        Event.reached = 0.1
        with stages.stage("forward"):
            Event.now += 0.25
        told = metrics(stages.header())["forward"][0]
        self.assertNotIn("sync", told)
        self.assertLess(told["dur"], 100)
        self.assertEqual(self.waits, 0)

    def test_full_synchronisation_on_request(self):
        stages.configure(sync=True)
        with stages.stage("forward"):
            pass
        with stages.stage("queue"):
            pass
        told = metrics(stages.header())
        self.assertEqual((self.waits, told["forward"][0]["sync"]), (2, 1))
        self.assertNotIn("sync", told["queue"][0])

    def test_another_device_has_its_own_function(self):
        calls = []
        stages.configure(sync=lambda: calls.append(1))
        with stages.stage("mystery", device=True):
            pass
        self.assertEqual((len(calls), metrics(stages.header())["mystery"][0]["sync"]), (2, 1))

    def test_stages_inside_of_a_device_stage_count_once(self):
        with stages.stage("forward"):
            Event.now += 1
            with stages.stage("d2h"):
                Event.now += 0.5
        told = metrics(stages.header())
        self.assertEqual(told["d2h"][0]["dur"], 500)
        self.assertLess(told["forward"][0]["dur"], 100)


async def call(app, extensions=None, kind="http"):
    """Runs an ASGI application for one request, and returns what it sent."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    await app({"type": kind, "extensions": extensions or {}}, receive, send)
    return sent


def asgi(parts, content_type=b"application/json"):
    async def app(scope, receive, send):
        with stages.stage("preprocess"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type)]})
        for i, part in enumerate(parts):
            with stages.stage("forward"):
                await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": part, "more_body": i + 1 < len(parts)})

    return stages.ASGI(app)


def field(message, name=b"server-timing"):
    return metrics(dict(message["headers"]).get(name, b"").decode())


class Asgi(Case):
    def test_a_whole_answer_tells_all_in_its_header(self):
        first, body = asyncio.run(call(asgi([b"x"])))
        self.assertEqual(set(field(first)), {"preprocess", "forward", "total"})
        self.assertEqual(body["body"], b"x")

    def test_a_stream_tells_all_in_a_trailer_where_there_are_trailers(self):
        sent = asyncio.run(call(asgi([b"x", b"y", b"z"]), {"http.response.trailers": {}}))
        self.assertEqual([m["type"].rsplit(".")[-1] for m in sent], ["start", "body", "body", "body", "trailers"])
        self.assertTrue(sent[0]["trailers"])
        self.assertEqual(dict(sent[0]["headers"])[b"trailer"], b"server-timing")
        self.assertEqual(field(sent[0]), {})
        self.assertEqual(len(field(sent[-1])["forward"]), 3)
        self.assertIn("total", field(sent[-1]))

    def test_a_stream_without_trailers_tells_what_is_known(self):
        sent = asyncio.run(call(asgi([b"x", b"y"])))
        self.assertEqual(set(field(sent[0])), {"preprocess", "forward"})
        self.assertEqual(len(sent), 3)

    def test_events_begin_at_once(self):
        order = []

        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]})
            order.append("sent")
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": False})

        async def run():
            async def send(message):
                order.append(message["type"])

            await stages.ASGI(app)({"type": "http"}, None, send)

        asyncio.run(run())
        self.assertEqual(order, ["http.response.start", "sent", "http.response.body"])

    def test_other_scopes_and_off_pass_as_they_are(self):
        app = asgi([b"x"])
        for kind, on in (("websocket", True), ("http", False)):
            stages.configure(on=on)
            sent = asyncio.run(call(app, kind=kind))
            self.assertEqual(field(sent[0]), {})


class Wsgi(Case):
    def run_app(self, app):
        environ = {}
        wsgiref.util.setup_testing_defaults(environ)
        got = []

        def start_response(status, headers, exc_info=None):
            got.append((status, dict(headers)))
            return lambda data: None

        body = wsgiref.validate.validator(stages.WSGI(app))(environ, start_response)
        text = b"".join(body)
        body.close()
        return got[0][0], got[0][1], text

    def test_a_whole_answer(self):
        def app(environ, start_response):
            start_response("200 OK", [("Content-Type", "text/plain")])
            with stages.stage("forward"):
                pass
            return [b"x"]

        status, headers, text = self.run_app(app)
        self.assertEqual((status, text), ("200 OK", b"x"))
        self.assertEqual(set(metrics(headers["Server-Timing"])), {"forward", "total"})

    def test_a_generator(self):
        def app(environ, start_response):
            with stages.stage("preprocess"):
                pass
            start_response("200 OK", [("Content-Type", "text/plain")])
            yield b"x"
            yield b"y"

        status, headers, text = self.run_app(app)
        self.assertEqual((status, text), ("200 OK", b"xy"))
        self.assertEqual(set(metrics(headers["Server-Timing"])), {"preprocess"})


if __name__ == "__main__":
    unittest.main()
