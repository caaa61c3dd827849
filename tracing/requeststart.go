package tracing

import (
	"bytes"
	"time"
)

const (
	year2000    = 946684800        // s since 1970; earlier stamps tell their unit to be a smaller one
	maxWait     = 10 * time.Minute // a longer wait is a broken clock or a reused header
	clockSkew   = time.Second      // how far ahead the balancer's clock may be
	maxFraction = 9                // digits: nanoseconds of a second
)

// RequestStart reads how long a request waited before weir, by the time stamp
// of a balancer: X-Request-Start, X-Queue-Start or X-Middleware-Start. Offer
// every request header; ok is false for others. Where several are present the
// longest wait is right, since the outermost balancer stamped first.
//
// The stamp is in seconds, milliseconds, microseconds or nanoseconds since
// 1970, told apart by size (none is before the year 2000), with or without
// "t=" and a server's name before it. Of a comma-separated list the earliest
// plausible stamp counts. A stamp up to a second ahead of now is a balancer
// whose clock runs ahead: it waited 0. A stamp further ahead, or more than ten
// minutes ago, is not plausible. Only the difference to now is kept.
func RequestStart(name, value []byte, now time.Time) (wait time.Duration, ok bool) {
	if !isName(name, "x-request-start") && !isName(name, "x-queue-start") && !isName(name, "x-middleware-start") {
		return 0, false
	}
	for len(value) > 0 {
		var item []byte
		item, value, _ = bytes.Cut(value, []byte(","))
		stamp, isStamp := instant(lastField(trimSpace(item)))
		if !isStamp {
			continue
		}
		if d := now.Sub(stamp); d >= -clockSkew && d <= maxWait {
			wait, ok = max(wait, d), true
		}
	}
	return wait, ok
}

// lastField drops a leading server name and "t=".
func lastField(b []byte) []byte {
	if i := bytes.LastIndexAny(b, " \t"); i >= 0 {
		b = b[i+1:]
	}
	if len(b) > 2 && b[0]|0x20 == 't' && b[1] == '=' {
		b = b[2:]
	}
	return b
}

// instant reads a decimal time stamp without loss: a float64 has no room for
// nanoseconds since 1970.
func instant(b []byte) (time.Time, bool) {
	whole, frac, _ := bytes.Cut(b, []byte("."))
	n, ok := digits(whole)
	if !ok {
		return time.Time{}, false
	}
	perSecond := int64(1)
	for perSecond < 1e9 && n/perSecond >= year2000*1000 {
		perSecond *= 1000
	}
	if n/perSecond < year2000 || n/perSecond >= year2000*1000 {
		return time.Time{}, false
	}
	ns, ok := fraction(frac, 1e9/perSecond)
	return time.Unix(n/perSecond, n%perSecond*(1e9/perSecond)+ns), ok
}

func digits(b []byte) (n int64, ok bool) {
	if len(b) == 0 || len(b) > 19 {
		return 0, false
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, n >= 0 // 19 digits can overflow
}

// fraction is the digits after the point in ns, unit being the ns of 1.
func fraction(b []byte, unit int64) (ns int64, ok bool) {
	if len(b) > maxFraction {
		b = b[:maxFraction]
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		unit /= 10
		ns += int64(c-'0') * unit
	}
	return ns, true
}
