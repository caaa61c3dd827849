#!/usr/bin/python3
"""A small speech recogniser behind HTTP: PocketSphinx, US English, 16 kHz.

    POST /asr                        WAV or raw PCM body             {"text": ...}
    POST /v1/audio/transcriptions    multipart, field "file"         {"text": ...}, or text with response_format=text
    GET  /ws                         WebSocket, as Vosk's server      {"partial": ...} for each frame, {"text": ...} at the end
    GET  /health                                                     {"status": "ok", ...}

Each answer tells by Server-Timing where its time went: preprocess, queue (waiting for a free decoder), forward and
postprocess. A decoder takes one request at a time and holds Python's global lock while it works, so each has a process
of its own: --workers of them.
"""

import argparse
import contextlib
import email.parser
import email.policy
import http
import http.server
import io
import json
import multiprocessing
import queue
import signal
import sys
import threading
import wave

import stages
import ws

RATE = 16000  # Hz, what the acoustic model was trained on
FRAME = 160  # samples in one 10 ms frame of features
MAX_BODY = 64 << 20  # bytes; half an hour of audio
MODEL = "/usr/share/pocketsphinx/model/en-us/"
CONTAINERS = {b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3", b"\x1aE\xdf\xa3": "WebM", b"FORM": "AIFF"}


class BadRequest(Exception):
    """What the caller did wrong, with the remedy; status is the answer's."""

    def __init__(self, message, status=400):
        super().__init__(message)
        self.status = status


class DecoderDied(Exception):
    """A worker process ended; the request that it worked on is lost."""


# --- audio -----------------------------------------------------------------------------------------------------------


def pcm_of(body):
    """Returns 16-bit little-endian mono samples at RATE from a WAV file, or from samples without a header."""
    if not body:
        raise BadRequest("the audio is empty; send a WAV file or raw 16-bit PCM")
    for magic, name in CONTAINERS.items():
        if body.startswith(magic):
            raise BadRequest(f"{name} is not supported; send WAV or raw PCM, 16 bit, mono, {RATE} Hz")
    pcm = wav_samples(body) if body.startswith(b"RIFF") else body
    if len(pcm) < 2 or len(pcm) % 2:
        raise BadRequest(f"{len(pcm)} bytes are no 16-bit samples; send an even number, at least two")
    return pcm


def wav_samples(body):
    try:
        with wave.open(io.BytesIO(body)) as wav:
            got = (wav.getnchannels(), wav.getsampwidth() * 8, wav.getframerate())
            samples = wav.readframes(wav.getnframes())
    except (wave.Error, EOFError) as err:
        reason = str(err) or "it ends early"
        raise BadRequest(f"the WAV file cannot be read: {reason}; send PCM, 16 bit, mono, {RATE} Hz") from err
    if got != (1, 16, RATE):
        raise BadRequest(f"the WAV file has {got[0]} channel(s), {got[1]} bit, {got[2]} Hz; convert it to mono, 16 bit, {RATE} Hz")
    return samples


# --- decoders --------------------------------------------------------------------------------------------------------


def decode_forever(pipe):
    """The life of a worker process: samples in, text out, until the pipe closes.

    What comes is (kind, samples): "whole" is an utterance, "part" goes on with one, and "end" ends it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    import pocketsphinx

    config = pocketsphinx.Decoder.default_config()
    config.set_string("-hmm", MODEL + "en-us")
    config.set_string("-lm", MODEL + "en-us.lm.bin")
    config.set_string("-dict", MODEL + "cmudict-en-us.dict")
    config.set_string("-logfn", "/dev/null")
    decoder = pocketsphinx.Decoder(config)
    pipe.send("ready")
    speaking = False
    while True:
        try:
            kind, pcm = pipe.recv()
        except EOFError:
            return
        if speaking and kind == "whole":
            decoder.end_utt()  # of a stream that broke off
            speaking = False
        if not speaking:
            decoder.start_utt()
        if pcm:
            decoder.process_raw(pcm, False, kind == "whole")  # at once: the result depends on nothing before it
        speaking = kind == "part"
        if not speaking:
            decoder.end_utt()
        best = decoder.hyp()
        pipe.send(best.hypstr if best else "")


class Worker:
    """One decoder in a process of its own. Not for two threads at once: see Pool."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=decode_forever, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def ready(self):
        """Waits until the model is loaded, and returns the worker."""
        self.answer()
        return self

    def decode(self, pcm, kind="whole"):
        try:
            self.pipe.send((kind, pcm))
        except OSError as err:
            raise DecoderDied("a decoder died; send the request again") from err
        return self.answer()

    def answer(self):
        try:
            return self.pipe.recv()
        except (EOFError, OSError) as err:
            raise DecoderDied("a decoder died; send the request again") from err


class Pool:
    """Workers, lent to one request at a time, in the order in which requests asked."""

    def __init__(self, size):
        self.size = size
        self.free = queue.Queue()
        for worker in [Worker() for _ in range(size)]:  # all load at once
            self.free.put(worker.ready())

    def decode(self, pcm):
        with self.lend() as worker:
            with stages.stage("forward", batch=1, seq=len(pcm) // 2 // FRAME, audio=len(pcm) / 2 / RATE):
                return worker.decode(pcm)

    @contextlib.contextmanager
    def lend(self):
        with stages.stage("queue"):
            worker = self.free.get()
        try:
            yield worker
        except DecoderDied:
            worker = Worker().ready()
            raise
        finally:
            self.free.put(worker)  # a dead one, if its successor did not start: the next request tries again


# --- HTTP ------------------------------------------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes
    timeout = 120  # seconds that a connection may stand still

    def do_GET(self):
        if self.path.partition("?")[0] == "/ws" and self.headers.get("Upgrade", "").lower() == "websocket":
            self.stream()
        elif self.path.partition("?")[0] == "/health":
            self.answer(200, *encode({"status": "ok", "workers": self.server.pool.size, "free": self.server.pool.free.qsize()}))
        else:
            self.send_error(404, f"nothing at {self.path}; POST to /asr or /v1/audio/transcriptions")

    do_HEAD = do_GET

    def do_POST(self):
        try:
            self.transcribe()
        except BadRequest as err:
            self.send_error(err.status, str(err))
        except DecoderDied as err:
            self.send_error(500, str(err))

    def transcribe(self):
        body = self.read_body()
        path = self.path.partition("?")[0]
        if path not in ("/asr", "/v1/audio/transcriptions"):
            raise BadRequest(f"nothing at {path}; POST to /asr or /v1/audio/transcriptions", 404)
        stages.start()
        with stages.stage("preprocess"):
            fields = self.fields(path, body)
            wanted = fields.get("response_format", b"json").decode("latin-1")
            if wanted not in ("json", "text"):
                raise BadRequest(f"response_format {wanted!r} is not supported; use json or text")
            pcm = pcm_of(fields["file"])
        text = self.server.pool.decode(pcm)
        with stages.stage("postprocess"):
            answer = encode(text + "\n" if wanted == "text" else {"text": text})
        self.answer(200, *answer, stages.header())

    def stream(self):
        """Speaks as Vosk's server does: one reply for each frame of audio and for eof and reset, none for a config."""
        key = self.headers.get("Sec-WebSocket-Key")
        if not key:
            self.send_error(400, "Sec-WebSocket-Key is missing; connect with a WebSocket client")
            return
        self.close_connection = True
        self.send_response(101)
        for name, value in (("Upgrade", "websocket"), ("Connection", "Upgrade"), ("Sec-WebSocket-Accept", ws.accept(key))):
            self.send_header(name, value)
        self.end_headers()
        socket = ws.WebSocket(self.rfile, self.wfile)
        try:
            stages.start()
            with self.server.pool.lend() as worker:
                stream = Stream(socket, worker)
                try:
                    stream.run()
                finally:
                    stream.abandon()
        except ws.Closed as end:
            socket.close(end.code)
        except DecoderDied:
            socket.close(1011)

    def fields(self, path, body):
        """The form's fields; a body that is no form is the file itself."""
        kind = self.headers.get_content_type()
        if kind == "multipart/form-data":
            fields = form_fields(body, self.headers.get_param("boundary"))
        elif path == "/asr":
            return {"file": body}
        else:
            raise BadRequest(f"the body is {kind}; send multipart/form-data with the field \"file\"")
        if "file" not in fields:
            raise BadRequest(f"the form has no field \"file\", only {sorted(fields)}")
        return fields

    # Reading

    def read_body(self):
        coding = self.headers.get("Transfer-Encoding")
        if coding is not None:
            if coding.lower() != "chunked":
                raise self.fatal(f"Transfer-Encoding {coding!r} is not supported; use chunked")
            return self.read_chunks()
        length = self.headers.get("Content-Length")
        if length is None:
            raise self.fatal("the length of the body is not told; send Content-Length or chunks", 411)
        if not length.isdecimal():
            raise self.fatal(f"Content-Length {length!r} is not a number")
        return self.read_exactly(int(length), 0)

    def read_chunks(self):
        body = bytearray()
        while True:
            size = self.read_line().partition(b";")[0].strip()
            try:
                size = int(size, 16) if size.isalnum() else -1
            except ValueError:
                size = -1
            if size < 0:
                raise self.fatal("a chunk's size is not a hexadecimal number")
            if size == 0:
                break
            body += self.read_exactly(size, len(body))
            if self.read_line() != b"":
                raise self.fatal("a chunk is longer than its size says")
        while self.read_line() != b"":  # trailers
            pass
        return bytes(body)

    def read_exactly(self, size, before):
        if before + size > MAX_BODY:
            raise self.fatal(f"the body has more than {MAX_BODY} bytes; split the audio", 413)
        data = self.rfile.read(size)
        if len(data) < size:
            raise self.fatal(f"the body ended after {before + len(data)} bytes")
        return data

    def read_line(self):
        line = self.rfile.readline(4096)
        if not line.endswith(b"\n"):
            raise self.fatal("a line of the chunked body is too long, or the body ended early")
        return line.rstrip(b"\r\n")

    def fatal(self, message, status=400):
        """A BadRequest after which the connection is of no use: the rest of its bytes have no known meaning."""
        self.close_connection = True
        return BadRequest(message, status)

    # Answering

    def send_error(self, code, message=None, explain=None):
        """Answers with JSON, for what http.server itself refuses too."""
        kind = "invalid_request_error" if code < 500 else "server_error"
        self.answer(code, *encode({"error": {"message": message or http.HTTPStatus(code).phrase, "type": kind}}))

    def answer(self, status, kind, body, timing=""):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if timing:
            self.send_header("Server-Timing", timing)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_request(self, code="-", size="-"):
        pass  # one line for each request tells less than Server-Timing does


class Stream:
    """One speaker at one decoder, which is the speaker's until the stream ends."""

    def __init__(self, socket, worker):
        self.socket, self.worker, self.heard = socket, worker, 0

    def run(self):
        last = False
        while not last:
            message = self.socket.receive()
            if isinstance(message, bytes):
                if len(message) % 2:
                    raise ws.Closed(1003)
                self.heard += len(message)
                self.socket.send(json.dumps({"partial": self.worker.decode(message, "part")}))
                continue
            try:
                ask = json.loads(message)
            except ValueError as err:
                raise ws.Closed(1003) from err
            if not isinstance(ask, dict) or ask.get("config", {}).get("sample_rate", RATE) != RATE:
                raise ws.Closed(1003)
            if "eof" in ask or "reset" in ask:
                last = "eof" in ask
                self.end()
        raise ws.Closed

    def abandon(self):
        """Leaves the decoder as the next needs it: with no utterance open."""
        if self.heard:
            self.worker.decode(b"", "end")

    def end(self):
        stages.start()
        with stages.stage("forward", batch=1, audio=self.heard / 2 / RATE):
            text = self.worker.decode(b"", "end")
        self.heard = 0
        self.socket.send(json.dumps({"text": text, "server_timing": stages.header()}))


def encode(value):
    """Returns the content type and the bytes of an answer: text as it is, anything else as JSON."""
    if isinstance(value, str):
        return "text/plain; charset=utf-8", value.encode()
    return "application/json", json.dumps(value, ensure_ascii=False).encode()


def form_fields(body, boundary):
    """Splits multipart/form-data into {name: bytes}; the first of two fields with one name counts."""
    if not boundary:
        raise BadRequest("multipart/form-data without a boundary; let the HTTP client write Content-Type")
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1"))
    if not parts or not parts.pop().startswith(b"--"):
        raise BadRequest("the form does not end with its boundary; was it cut off?")
    fields = {}
    for part in parts:
        head, _, content = part.partition(b"\r\n\r\n")
        headers = email.parser.BytesHeaderParser(policy=email.policy.HTTP).parsebytes(head.lstrip(b" \t\r\n"))
        name = headers["Content-Disposition"] and headers["Content-Disposition"].params.get("name")
        if not name:
            raise BadRequest("a part of the form has no name; send Content-Disposition: form-data; name=...")
        fields.setdefault(name, content)
    return fields


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # connections that wait for accept
    daemon_threads = True  # idle connections do not hold up the end

    def handle_error(self, request, client_address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that left is no error
            super().handle_error(request, client_address)


def main():
    parser = argparse.ArgumentParser(description="PocketSphinx behind HTTP", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0: a free one")
    parser.add_argument("--workers", type=int, default=1, help="decoder processes, each for one request at a time")
    args = parser.parse_args()
    if args.workers < 1:
        parser.error(f"--workers {args.workers}: at least one decoder is needed")
    server = Server((args.host, args.port), Handler)
    try:
        server.pool = Pool(args.workers)
    except DecoderDied:
        sys.exit("a decoder did not start; install pocketsphinx-en-us and python3-pocketsphinx, and use /usr/bin/python3")
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"listening on http://{args.host}:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
