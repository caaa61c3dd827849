import asyncio
import contextvars
import re
import threading
import time
import unittest

import stages


def durations(value):
    """{name: [ms, ...]} of a Server-Timing value."""
    told = {}
    for metric in value.split(", "):
        name, dur = re.match(r"([^;]+);dur=([0-9.]+)", metric).groups()
        told.setdefault(name, []).append(float(dur))
    return told


class Stages(unittest.TestCase):
    def setUp(self):
        stages.header()  # nothing left from another test

    def test_stages_come_in_their_order_with_total_last(self):
        stages.start()
        with stages.stage("queue"):
            pass
        with stages.stage("forward"):
            pass
        names = [metric.partition(";")[0] for metric in stages.header().split(", ")]
        self.assertEqual(names, ["queue", "forward", "total"])

    def test_durations_are_milliseconds_and_total_covers_them(self):
        stages.start()
        with stages.stage("forward"):
            time.sleep(0.05)
        told = durations(stages.header())
        self.assertGreaterEqual(told["forward"][0], 50)
        self.assertLess(told["forward"][0], 5000)
        self.assertGreaterEqual(told["total"][0], told["forward"][0])

    def test_parameters_are_bare_numbers_and_may_come_late(self):
        with stages.stage("forward", seq=1500, sync=True, audio=2.75) as told:
            told["batch"] = 8
        self.assertRegex(stages.header(), r"^forward;dur=[0-9]+\.[0-9]{3};seq=1500;sync=1;audio=2\.750;batch=8, total;")

    def test_a_stage_timed_elsewhere_is_told_as_given(self):
        stages.add("h2d", 0.0019, bytes=1228800, n=3)
        self.assertTrue(stages.header().startswith("h2d;dur=1.900;bytes=1228800;n=3, total;dur="))

    def test_a_large_or_tiny_number_has_no_exponent(self):
        stages.add("h2d", 1e-9, bytes=10**15, audio=1e-9)
        self.assertTrue(stages.header().startswith("h2d;dur=0.000;bytes=1000000000000000;audio=0.000,"))

    def test_a_repeated_stage_is_told_twice(self):
        for _ in range(2):
            with stages.stage("forward"):
                pass
        self.assertEqual(len(durations(stages.header())["forward"]), 2)

    def test_a_stage_that_raises_is_told(self):
        with self.assertRaises(KeyError):
            with stages.stage("forward"):
                raise KeyError
        self.assertIn("forward", durations(stages.header()))

    def test_header_ends_the_record(self):
        stages.add("forward", 1)
        stages.header()
        self.assertEqual(stages.header(), "")

    def test_start_forgets_a_request_that_never_ended(self):
        stages.add("forward", 1)
        stages.start()
        self.assertNotIn("forward", stages.header())

    def test_a_name_that_would_break_the_header_is_refused(self):
        for name in ("", "two words", "a;b", "a,b", "a\n"):
            with self.assertRaises(ValueError, msg=name):
                stages.add(name, 1)
            with self.assertRaises(ValueError, msg=name):
                stages.add("forward", 1, **{name: 1})

    def test_threads_do_not_see_each_other(self):
        got, both = {}, threading.Barrier(2)

        def handle(name):
            stages.start()
            with stages.stage(name):
                both.wait(10)
            both.wait(10)
            got[name] = stages.header()

        threads = [threading.Thread(target=handle, args=(name,)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual({name: set(durations(value)) for name, value in got.items()}, {"a": {"a", "total"}, "b": {"b", "total"}})

    def test_a_copied_context_adds_to_the_same_record(self):
        stages.start()
        threads = [threading.Thread(target=contextvars.copy_context().run, args=(stages.add, "forward", 1)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(durations(stages.header())["forward"]), 8)

    def test_asyncio_tasks_do_not_see_each_other(self):
        async def handle(name):
            stages.start()
            with stages.stage(name):
                await asyncio.sleep(0.01)
            return set(durations(stages.header()))

        async def both():
            return await asyncio.gather(handle("a"), handle("b"))

        self.assertEqual(asyncio.run(both()), [{"a", "total"}, {"b", "total"}])


if __name__ == "__main__":
    unittest.main()
