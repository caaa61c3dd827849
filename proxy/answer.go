package proxy

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/valyala/fasthttp"

	"weir/classifier"
)

var (
	errConnect = errors.New("CONNECT is not supported: weir stands in front of one server")
	errBug     = errors.New("a bug in weir ended the upload")
	errStopped = errors.New("the answer ended before the upload")
)

// shuttingDown is the word for requests that come while weir drains. Their
// connections are closed, so that clients go elsewhere.
const shuttingDown = "shutting_down"

// A connectError means that no connection to the server could be had.
type connectError struct{ err error }

func (e *connectError) Error() string { return e.err.Error() }
func (e *connectError) Unwrap() error { return e.err }

// An answerError means that the server's answer did not come, or not whole.
type answerError struct{ err error }

func (e *answerError) Error() string { return e.err.Error() }
func (e *answerError) Unwrap() error { return e.err }

// A fault is how an error ends a request: the status that the client gets (0:
// none, the connection just closes), the word for error.type, and the text.
type fault struct {
	status  int
	word    string
	text    string
	outcome classifier.Outcome
}

// faultOf maps every error of an exchange to its end.
func (c *conn) faultOf(err error) fault {
	var (
		answer   *answerError
		flush    *flushError
		bad      *headError
		server   = c.srv.target
		upstream = c.up.err
	)
	refused, known := faultOfGate(err, server)
	switch {
	case c.hasLeft(), errors.Is(err, ErrClientGone):
		return fault{0, "client_gone", "the client left", classifier.Canceled}
	case known:
		return refused
	case errors.As(err, &flush):
		return fault{0, "client_gone", "the client left", classifier.Canceled}
	case upstream != nil && errors.Is(upstream, errBadBody):
		return fault{400, "bad_request", "the body's chunked coding is malformed", classifier.Failed}
	case upstream != nil && errors.As(upstream, &flush) && isTimeout(upstream):
		return fault{504, "server_timeout", server + " took no bytes of the request for write_timeout; check whether it is stuck", classifier.Failed}
	case upstream != nil && isTimeout(upstream):
		return fault{408, "client_timeout", "the body did not come within body_timeout", classifier.Canceled}
	case upstream != nil && !errors.As(upstream, &flush) && !errors.Is(upstream, errStopped) && !errors.Is(upstream, errBug):
		return fault{0, "client_gone", "the client left in the middle of its request", classifier.Canceled}
	case errors.As(err, &answer) && isTimeout(err):
		return fault{504, "server_timeout", noAnswer(server), classifier.Failed}
	case errors.As(err, &bad), errors.Is(err, errBareLF), errors.Is(err, errHeadTooLarge), errors.Is(err, errBadBody):
		return fault{502, "bad_response", server + " sent an answer that is no valid HTTP/1.1", classifier.Failed}
	case c.used && (errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)):
		// The server closed an idle connection just as this request came. Its
		// client would see that connection close, and may send again.
		return fault{0, "server_reset", "the server closed the connection", classifier.Failed}
	}
	return fault{502, "server_reset", server + " closed the connection before it answered", classifier.Failed}
}

// faultOfGate maps what keeps a request from the server, for all protocols.
func faultOfGate(err error, server string) (fault, bool) {
	if f, ok := refusalOf(err); ok {
		return f, true
	}
	var connect *connectError
	switch {
	case !errors.As(err, &connect):
		return fault{}, false
	case isTimeout(err):
		return fault{504, "server_timeout", "no connection to " + server + " within connect_timeout; check that the server runs and listens there", classifier.Failed}, true
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return fault{503, "too_many_connections", "no file descriptor is left to connect to " + server + "; raise the limit (ulimit -n), or set max_connections below half of it", classifier.Failed}, true
	}
	return fault{502, "server_unreachable", unreachable(server, err), classifier.Failed}, true
}

func noAnswer(server string) string {
	return server + " gave no answer within response_timeout; raise response_timeout if it may take longer"
}

func (c *conn) hasLeft() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.left
}

// fail ends an exchange that went wrong.
func (c *conn) fail(err error) bool {
	f := c.faultOf(err)
	inTouch := c.server.Conn != nil
	c.dropServer() // before the place is given to another
	c.srv.Gate.Release(&c.pass)
	return c.end(f, !inTouch)
}

// refuse ends a request that the gate did not let in. The server knows
// nothing of it, so its connection stays.
func (c *conn) refuse(err error) bool { return c.end(c.faultOf(err), true) }

// end gives the request its end; it tells whether the client's connection is
// still good, which it can be only if nothing of the body was read.
func (c *conn) end(f fault, untouched bool) bool {
	o := &c.pass.Observation
	o.Outcome, o.Error = f.outcome, f.word
	if f.status == 0 || c.answered {
		c.reset()
		return false
	}
	o.Status = f.status
	keep := untouched && c.discardBody() && f.word != shuttingDown
	c.reply(f, keep)
	o.Done = time.Now()
	return keep
}

// reset closes the client's connection so that a part of an answer cannot
// pass for a whole one.
func (c *conn) reset() {
	if tcp, ok := rawConn(c.client.Conn).(*net.TCPConn); ok && c.answered && c.byClose {
		_ = tcp.SetLinger(0)
	}
	c.client.w.Reset(&c.client)
	_ = c.client.Conn.Close()
}

// discardBody drops the body of a refused request, if it is here already.
func (c *conn) discardBody() bool {
	if c.req.chunked || c.req.expect || c.req.length > int64(c.client.r.Buffered()) {
		return false
	}
	_, _ = c.client.r.Discard(int(max(c.req.length, 0)))
	return !c.req.close && (c.req.minor != '0' || c.req.alive) && !c.srv.draining()
}

// refuseHead answers a request whose head cannot be trusted, and closes.
func (c *conn) refuseHead(err error) bool {
	var bad *headError
	f := fault{400, "bad_request", err.Error(), classifier.Failed}
	switch {
	case errors.Is(err, errHeadTooLarge):
		f.status, f.text = 431, "the request's head is larger than max_head_size "+strconv.Itoa(c.cfg.maxHeadSize)+"; send less, or raise it"
	case errors.Is(err, errConnect):
		f.status = 501
	case isTimeout(err):
		f.status, f.word, f.text = 408, "client_timeout", "the request's head did not come within head_timeout"
	case errors.As(err, &bad), errors.Is(err, errBareLF):
	default:
		return false // the client is gone
	}
	c.req.minor = '1'
	c.reply(f, false)
	o := &c.pass.Observation
	now := time.Now()
	o.Protocol, o.Class, o.Method, o.Client = "http/1.1", "(malformed)", "_OTHER", c.addr
	o.Enqueued, o.Done, o.Status, o.Outcome, o.Error = now, now, f.status, f.outcome, f.word
	if c.srv.Gate.Sink != nil {
		c.srv.Gate.Sink(o)
	}
	c.pass.reset()
	return false
}

// body is weir's own answer: JSON in the shape that OpenAI's clients read, with
// the reason and the remedy.
func (f fault) body() []byte {
	text, _ := json.Marshal(map[string]any{"error": map[string]any{"message": "weir: " + f.text, "type": f.word, "code": f.status}})
	return append(text, '\n')
}

// reply writes weir's own answer to the client.
func (c *conn) reply(f fault, keep bool) {
	text := f.body()
	b := append(c.buf[:0], "HTTP/1.1 "...)
	b = strconv.AppendInt(b, int64(f.status), 10)
	b = append(append(append(b, ' '), fasthttp.StatusMessage(f.status)...), "\r\nDate: "...)
	b = fasthttp.AppendHTTPDate(b, time.Now())
	b = append(b, "\r\nContent-Type: application/json\r\nContent-Length: "...)
	b = append(strconv.AppendInt(b, int64(len(text)), 10), "\r\n"...)
	if f.status == 503 {
		b = append(b, "Retry-After: 1\r\n"...)
	}
	if c.cfg.serverTiming {
		b = append(append(append(b, "Proxy-Status: weir; error="...), proxyError(f)...), "\r\n"...)
	}
	b = append(appendConnection(b, keep, c.req.minor), "\r\n"...)
	if !c.headOnly {
		b = append(b, text...)
	}
	c.buf = b
	_, _ = c.client.w.Write(b)
	_ = c.client.w.Flush()
	c.answered = true
	if !keep {
		c.linger()
	}
}

// proxyError names a fault as RFC 9209 does, with weir's own word beside it.
func proxyError(f fault) string {
	name := "proxy_internal_response"
	switch f.word {
	case "server_unreachable":
		name = "connection_refused"
	case "server_timeout":
		name = "connection_timeout"
	case "server_reset":
		name = "connection_terminated"
	case "bad_response":
		name = "http_protocol_error"
	case "bad_request":
		name = "http_request_error"
	}
	return name + "; details=" + f.word
}
