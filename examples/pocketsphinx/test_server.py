"""Real speech through the real recogniser. Needs Debian's pocketsphinx packages: see README.md."""

import http.client
import json
import os
import re
import signal
import socket
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


class Speaker:
    """A WebSocket client of the test's own."""

    def __init__(self, port, path="/ws"):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self.file = self.socket.makefile("rb")
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode())
        self.head = b"".join(iter(self.file.readline, b"\r\n")).decode()

    def send(self, payload, first=None):
        text = isinstance(payload, str)
        payload = payload.encode() if text else payload
        first = first or 0x80 | (1 if text else 2)
        size = len(payload)
        head = bytes([first, 0x80 | size]) if size < 126 else bytes([first, 0xFE]) + struct.pack(">H", size)
        mask = b"\x01\x02\x03\x04"
        self.socket.sendall(head + mask + bytes(c ^ mask[i % 4] for i, c in enumerate(payload)))

    def receive(self):
        first, size = self.file.read(2)
        if size > 125:
            size = int.from_bytes(self.file.read(2 if size == 126 else 8), "big")
        payload = self.file.read(size)
        return json.loads(payload) if first == 0x81 else (first & 0x0F, payload)

    def say(self, samples, size=3200):
        """Sends frames of 100 ms, and returns the last partial result."""
        partial = ""
        for i in range(0, len(samples), size):
            self.send(samples[i : i + size])
            partial = self.receive()["partial"]
        return partial

    def close(self):
        self.file.close()
        self.socket.close()


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

    def speaker(self, **wanted):
        speaker = Speaker(self.port, **wanted)
        self.addCleanup(speaker.close)
        return speaker

    def test_a_stream_gets_a_partial_for_each_frame_and_its_text_at_the_end(self):
        speaker = self.speaker()
        self.assertIn("101 Switching Protocols", speaker.head)
        self.assertIn("s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", speaker.head)  # RFC 6455's own example
        speaker.send('{"config": {"sample_rate": 16000}}')
        self.assertIn("go forward", speaker.say(speech("goforward.raw")))
        speaker.send('{"reset" : 1}')
        self.assertEqual(speaker.receive()["text"], "go forward ten meters")
        speaker.say(speech("something.raw"))
        speaker.send('{"eof" : 1}')
        final = speaker.receive()
        self.assertIn("do something", final["text"])
        self.assertRegex(final["server_timing"], r"forward;dur=[0-9.]+;batch=1;audio=[0-9.]+, total;dur=")
        self.assertEqual(speaker.receive(), (8, b"\x03\xe8"))

    def test_pieces_and_pings_are_as_good_as_whole_messages(self):
        speaker = self.speaker()
        speaker.send(b"\0" * 1000, first=0x02)
        speaker.send(b"are you there", first=0x89)
        self.assertEqual(speaker.receive(), (10, b"are you there"))
        speaker.send(b"\0" * 1000, first=0x80)
        self.assertEqual(speaker.receive(), {"partial": ""})
        speaker.send(b"\x03\xe8", first=0x88)
        self.assertEqual(speaker.receive(), (8, b"\x03\xe8"))

    def test_a_stream_that_makes_no_sense_is_closed_with_a_code(self):
        for payload, code in (("no JSON", 1003), (b"odd", 1003), ('{"config": {"sample_rate": 8000}}', 1003)):
            speaker = self.speaker()
            speaker.send(payload)
            self.assertEqual(speaker.receive(), (8, struct.pack(">H", code)))
        status, body, _ = self.get("/ws", Connection="Upgrade", Upgrade="websocket")
        self.refused(status, body, "Sec-WebSocket-Key")

    def get(self, path, **headers):
        self.connection.request("GET", path, None, headers)
        answer = self.connection.getresponse()
        return answer.status, answer.read(), answer.headers

    def test_who_leaves_in_the_middle_gives_the_decoder_back_unspoilt(self):
        speaker = self.speaker()
        speaker.say(speech("something.raw")[:32000])
        speaker.close()
        speaker = self.speaker()
        speaker.say(speech("goforward.raw"))
        speaker.send('{"eof" : 1}')
        self.assertIn("go forward ten meters", speaker.receive()["text"])
        status, body, _ = self.post("/asr", speech("goforward.raw"))
        self.assertEqual(json.loads(body)["text"], "go forward ten meters")

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
