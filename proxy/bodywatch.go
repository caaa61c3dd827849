package proxy

import (
	"sync"

	"weir/tracing"
)

// seenBodies are lent to answers that may tell their timings in JSON.
var seenBodies = sync.Pool{New: func() any { return new(tracing.Body) }}

// watchBody begins to look at an answer's body as it passes; nil where there
// is nothing to see.
func (c *conn) watchBody(status int) *tracing.Body {
	if status < 200 || status >= 300 || c.cfg.ingest == nil {
		return nil
	}
	var kind, coding []byte
	for i := range c.res.fields {
		f := &c.res.fields[i]
		switch {
		case f.kind != fieldOther:
		case equalFold(f.name, "content-type"):
			kind = f.value
		case equalFold(f.name, "content-encoding"):
			coding = f.value
		}
	}
	if len(kind) == 0 {
		return nil
	}
	b := seenBodies.Get().(*tracing.Body)
	if !b.Start(kind, coding) {
		seenBodies.Put(b)
		return nil
	}
	return b
}

// readBody reads what the body told. The client has the whole answer by now.
func (c *conn) readBody(b *tracing.Body) {
	if b == nil {
		return
	}
	c.cfg.ingest.Body(&c.pass.Observation, b)
	seenBodies.Put(b)
}
