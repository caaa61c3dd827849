"""The helper under a real ASGI server, around a real recogniser."""

import concurrent.futures
import os
import re
import socket
import subprocess
import sys
import time
import unittest
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
SPEECH = "/usr/share/pocketsphinx/test/data/goforward.raw"


class Fastapi(unittest.TestCase):
    def setUp(self):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", "fastapi_app:app", "--host", "127.0.0.1", "--port", str(self.port), "--log-level", "warning"]
        self.server = subprocess.Popen(command, cwd=HERE)
        self.addCleanup(self.server.wait)
        self.addCleanup(self.server.terminate)
        for _ in range(600):
            if self.server.poll() is not None:
                self.fail("the server ended")
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.1)
        self.fail("the server did not start")

    def transcribe(self, audio):
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/asr", audio, timeout=60) as answer:
            text, value = answer.read().decode(), answer.headers["Server-Timing"]
        took = (time.perf_counter() - began) * 1e3
        durations = {name: float(ms) for name, ms in re.findall(r"([a-z]+);dur=([0-9.]+)", value)}
        return text, durations, took

    def test_each_answer_tells_its_own_stages(self):
        with open(SPEECH, "rb") as f:
            audio = f.read()
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(self.transcribe, [audio] * 3))
        queued = sorted(durations["queue"] for _, durations, _ in answers)
        forward = min(durations["forward"] for _, durations, _ in answers)
        for text, durations, took in answers:
            self.assertIn("go forward ten meters", text)
            self.assertEqual(set(durations), {"preprocess", "queue", "forward", "postprocess", "total"})
            self.assertLessEqual(sum(durations.values()) - durations["total"], durations["total"] + 1)
            self.assertLessEqual(durations["total"], took + 1)
        # One decoder: the second waits for the first, the third for both.
        self.assertGreater(queued[1], forward / 2)
        self.assertGreater(queued[2], forward)


if __name__ == "__main__":
    unittest.main()
