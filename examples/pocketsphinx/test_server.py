"""Real speech through the real recogniser. Needs Debian's pocketsphinx packages: see README.md."""

import http.client
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
SPEECH = "/usr/share/pocketsphinx/test/data/"
BOUNDARY = "between"


def speech(name):
    with open(SPEECH + name, "rb") as file:
        return file.read()


def form(**fields):
    body = b""
    for name, content in fields.items():
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="a"\r\n\r\n'
        body += head.encode() + content + b"\r\n"
    return body + f"--{BOUNDARY}--\r\n".encode()


def wav(rate=16000, channels=1, samples=b"\0\0" * 1600):
    fmt = struct.pack("<HHIIHH", 1, channels, rate, rate * channels * 2, channels * 2, 16)
    chunks = b"WAVEfmt " + struct.pack("<I", len(fmt)) + fmt + b"data" + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


class Recogniser(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        command = [sys.executable, os.path.join(HERE, "server.py"), "--port", "0"]
        cls.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        cls.port = int(re.search(r":(\d+)$", cls.process.stdout.readline().strip()).group(1))

    @classmethod
    def tearDownClass(cls):
        cls.process.send_signal(signal.SIGTERM)
        if cls.process.wait(10) != 0:
            raise AssertionError(f"the server ended with {cls.process.returncode}, not 0, after SIGTERM")
        cls.process.stdout.close()

    def setUp(self):
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        self.addCleanup(self.connection.close)

    def post(self, path, body, connection=None, **headers):
        connection = connection or self.connection
        connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers

    def post_form(self, **fields):
        return self.post("/v1/audio/transcriptions", form(**fields), Content_Type=f"multipart/form-data; boundary={BOUNDARY}")

    def refused(self, status, body, *words):
        self.assertEqual(status, 400, body)
        message = json.loads(body)["error"]["message"]
        for word in words:
            self.assertIn(word, message)

    def test_raw_samples_and_wav_files_come_back_as_text_on_one_connection(self):
        for file, text in (
            ("goforward.raw", "go forward ten meters"),
            ("something.raw", "go somewhere and do something"),
            ("cards/001.wav", "ten of clubs"),
            ("goforward.raw", "go forward ten meters"),  # what came before does not matter
        ):
            status, body, _ = self.post("/asr", speech(file))
            self.assertEqual((status, body), (200, json.dumps({"text": text}).encode()), file)

    def test_the_openai_shape_answers_json_or_plain_text(self):
        status, body, headers = self.post_form(file=speech("goforward.raw"), model=b"whisper-1")
        self.assertEqual((status, json.loads(body)), (200, {"text": "go forward ten meters"}))
        status, body, headers = self.post_form(file=speech("goforward.raw"), response_format=b"text")
        self.assertEqual((status, body), (200, b"go forward ten meters\n"))
        self.assertEqual(headers.get_content_type(), "text/plain")

    def test_a_chunked_body_is_read(self):
        data = speech("goforward.raw")
        pieces = (data[i : i + 4001] for i in range(0, len(data), 4001))
        status, body, _ = self.post("/asr", pieces)  # http.client chunks what has no length
        self.assertEqual((status, json.loads(body)["text"]), (200, "go forward ten meters"))

    def test_server_timing_adds_up_and_tells_the_length(self):
        _, _, headers = self.post("/asr", speech("goforward.raw"))
        told = dict(re.findall(r"(\w+);dur=([0-9.]+)", headers["Server-Timing"]))
        self.assertEqual(list(told), ["preprocess", "queue", "forward", "postprocess", "total"])
        ms = {name: float(value) for name, value in told.items()}
        self.assertLess(abs(ms["total"] - sum(ms.values()) / 2), max(5, 0.01 * ms["total"]))
        self.assertIn(";batch=1;seq=278;audio=2.786", headers["Server-Timing"])

    def test_with_one_decoder_the_second_request_waits_in_queue(self):
        waits = []

        def one():
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            _, _, headers = self.post("/asr", speech("goforward.raw"), connection)
            waits.append(float(re.search(r"queue;dur=([0-9.]+)", headers["Server-Timing"]).group(1)))
            connection.close()

        threads = [threading.Thread(target=one) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertLess(min(waits), 50)
        self.assertGreater(max(waits), 100)

    def test_audio_that_cannot_be_decoded_is_refused_with_the_remedy(self):
        self.refused(*self.post("/asr", b"")[:2], "empty")
        self.refused(*self.post("/asr", b"abc")[:2], "3 bytes")
        self.refused(*self.post("/asr", b"fLaC" + b"\0" * 100)[:2], "FLAC", "send WAV")
        self.refused(*self.post("/asr", b"RIFF\0")[:2], "cannot be read")
        self.refused(*self.post("/asr", wav(rate=8000))[:2], "8000 Hz", "convert it")
        self.refused(*self.post("/asr", wav(channels=2))[:2], "2 channel(s)")

    def test_silence_has_no_text(self):
        status, body, _ = self.post("/asr", wav())
        self.assertEqual((status, json.loads(body)), (200, {"text": ""}))

    def test_a_form_with_a_fault_is_refused_with_the_remedy(self):
        self.refused(*self.post_form(audio=b"ab")[:2], 'no field "file"')
        self.refused(*self.post_form(file=wav(), response_format=b"srt")[:2], "'srt'", "json or text")
        self.refused(*self.post("/v1/audio/transcriptions", wav(), Content_Type="audio/wav")[:2], "audio/wav")
        self.refused(*self.post("/asr", form(file=b"ab"), Content_Type="multipart/form-data")[:2], "boundary")
        cut = form(file=wav())[:-8]
        kind = f"multipart/form-data; boundary={BOUNDARY}"
        self.refused(*self.post("/asr", cut, Content_Type=kind)[:2], "cut off")

    def test_a_file_that_looks_like_a_boundary_stays_whole(self):
        tricky = wav(samples=b"--" + BOUNDARY.encode() + b"\r\n\r\n" + b"\0" * 1602)
        status, body, _ = self.post_form(file=tricky)
        self.assertEqual((status, json.loads(body)), (200, {"text": ""}))

    def test_framing_that_makes_no_sense_closes_the_connection(self):
        for headers in ({"Content_Length": "ten"}, {"Transfer_Encoding": "gzip"}):
            status, body, answered = self.post("/asr", b"", http.client.HTTPConnection("127.0.0.1", self.port, timeout=60), **headers)
            self.refused(status, body)
            self.assertEqual(answered["Connection"], "close")

    def test_other_methods_and_paths_get_json_too(self):
        status, body, _ = self.post("/elsewhere", b"x")
        self.assertEqual(status, 404)
        self.assertIn("/asr", json.loads(body)["error"]["message"])
        self.connection.request("DELETE", "/asr")
        answer = self.connection.getresponse()
        self.assertEqual(answer.status, 501)
        json.loads(answer.read())

    def test_health_answers_while_the_decoder_works(self):
        busy = threading.Thread(target=self.post, args=("/asr", speech("librivox/sense_and_sensibility_01_austen_64kb-0930.wav")))
        busy.start()
        other = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        seen = []
        while busy.is_alive():
            other.request("GET", "/health")
            seen.append(json.loads(other.getresponse().read())["free"])
        busy.join()
        other.close()
        self.assertIn(0, seen)


if __name__ == "__main__":
    unittest.main()
