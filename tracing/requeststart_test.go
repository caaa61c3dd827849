package tracing

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"
)

// arrival is when the requests of these tests come: 5 s after the stamps.
var arrival = time.Unix(1788000005, 250_000_000)

func TestTheWaitIsReadInWhicheverUnitTheBalancerStamps(t *testing.T) {
	for name, c := range map[string]struct {
		value string
		want  time.Duration
	}{
		"nginx, seconds with milliseconds": {"t=1788000000.250", 5 * time.Second},
		"the same without t=":              {"1788000000.250", 5 * time.Second},
		"weir itself":                      {"t=1788000000.249", 5001 * milli},
		"Heroku, milliseconds":             {"1788000000250", 5 * time.Second},
		"Apache, microseconds":             {"t=1788000000250001", 5*time.Second - time.Microsecond},
		"Apache with its duration":         {"D=3775 t=1788000000250000", 5 * time.Second},
		"Render, nanoseconds":              {"1788000000250000001", 5*time.Second - 1},
		"whole seconds":                    {"t=1788000000", 5250 * milli},
		"a server's name before it":        {"web-1 t=1788000000.250", 5 * time.Second},
		"a tab before it":                  {"web-1\tt=1788000000.250", 5 * time.Second},
		"upper case":                       {"T=1788000000.250", 5 * time.Second},
		"blanks around":                    {" \tt=1788000000.250\t ", 5 * time.Second},
		"nanoseconds in a fraction":        {"t=1788000000.250000001", 5*time.Second - 1},
		"more digits than nanoseconds":     {"t=1788000000.2500000019999", 5*time.Second - 1},
		"milliseconds with a fraction":     {"1788000000250.5", 5*time.Second - 500*time.Microsecond},
		"microseconds with a fraction":     {"1788000000250000.001", 5*time.Second - 1},
		"nanoseconds with a fraction":      {"1788000000250000000.9", 5 * time.Second},
		"a point at the end":               {"1788000000.", 5250 * milli},
		"leading zeros":                    {"t=0001788000000.250", 5 * time.Second},
		"no wait at all":                   {"t=1788000005.250", 0},
		"the longest wait":                 {"t=1787999405.250", 10 * time.Minute},
		"the farthest ahead":               {"t=1788000006.250", 0},
	} {
		for _, header := range []string{"X-Request-Start", "x-queue-start", "X-MIDDLEWARE-START"} {
			if wait, ok := RequestStart([]byte(header), []byte(c.value), arrival); !ok || wait != c.want {
				t.Errorf("%s, %s: %s: %v, %v; want %v", name, header, c.value, wait, ok, c.want)
			}
		}
	}
}

func TestAStampThatCannotBeIsNoWait(t *testing.T) {
	for name, value := range map[string]string{
		"empty":                               "",
		"blanks":                              " \t ",
		"t= alone":                            "t=",
		"no number":                           "t=now",
		"a date":                              "2026-08-29T12:00:00Z",
		"a negative one":                      "t=-1788000000.250",
		"a signed one":                        "t=+1788000000.250",
		"an exponent":                         "1.788e9",
		"hexadecimal":                         "0x6a92d4c0",
		"a fraction alone":                    ".250",
		"two points":                          "t=1788000000.250.1",
		"a unit":                              "1788000000250ms",
		"quotes":                              `"1788000000.250"`,
		"two t=":                              "t=t=1788000000.250",
		"another key":                         "s=1788000000.250",
		"a blank after t=":                    "t= ",
		"zero":                                "t=0",
		"before the year 2000, in seconds":    "t=946684799",
		"seconds since the machine's start":   "t=123456.789",
		"more than a second ahead":            "t=1788000006.251",
		"more than ten minutes ago":           "t=1787999405.249",
		"a day ago":                           "t=1787913600",
		"a year ago, in ms":                   "1756464000000",
		"19 digits that overflow":             "9999999999999999999",
		"just past 63 bits":                   "9223372036854775808",
		"20 digits":                           "17880000002500000000",
		"20 digits that come round":           "20234744073959551616",
		"hundreds of digits":                  strings.Repeat("1", 300),
		"what an empty nginx variable leaves": "t=,",
		"nothing but commas":                  ",,,",
	} {
		if wait, ok := RequestStart([]byte("X-Request-Start"), []byte(value), arrival); ok || wait != 0 {
			t.Errorf("%s: %q: %v, %v; want none", name, value, wait, ok)
		}
	}
}

func TestOfSeveralStampsTheEarliestThatCanBeCounts(t *testing.T) {
	for value, want := range map[string]time.Duration{
		"t=1788000000.250, t=1788000003.250":                   5 * time.Second,
		"t=1788000003.250,t=1788000000.250":                    5 * time.Second,
		"t=1788000003.250, 1788000004250, 1788000000250000":    5 * time.Second,
		"t=123, t=1788000003.250":                              2 * time.Second,
		"t=1788000003.250, t=1700000000.000, t=1788000006.300": 2 * time.Second,
		"t=1788000005.750, t=1788000004.250":                   time.Second,
		"unknown, , web-1 t=1788000003.250,":                   2 * time.Second,
		"t=1788000003.250, t=1788000003.250":                   2 * time.Second,
		"t=1788000003,250":                                     2250 * milli, // a decimal comma costs the fraction
		strings.Repeat("x,", 5000) + "1788000003250":           2 * time.Second,
	} {
		if wait, ok := RequestStart([]byte("x-request-start"), []byte(value), arrival); !ok || wait != want {
			t.Errorf("%.60q: %v, %v; want %v", value, wait, ok, want)
		}
	}
}

// The unit is told by the size: the year 2000 in one unit is the same number
// as a day of January 1970 in the next smaller one.
func TestUnitsChangeAtTheYear2000(t *testing.T) {
	for value, want := range map[string]time.Time{
		"946684800":           time.Unix(946684800, 0),
		"946684799999":        time.Unix(946684799999, 0),
		"946684800000":        time.Unix(946684800, 0),
		"946684799999999":     time.UnixMilli(946684799999999),
		"946684800000000":     time.Unix(946684800, 0),
		"946684799999999999":  time.UnixMicro(946684799999999999),
		"946684800000000000":  time.Unix(946684800, 0),
		"9223372036854775807": time.Unix(0, 9223372036854775807),
	} {
		if got, ok := instant([]byte(value)); !ok || !got.Equal(want) {
			t.Errorf("%s is %v, %v; want %v", value, got, ok, want)
		}
	}
	for _, value := range []string{"946684799", "1", "0"} {
		if got, ok := instant([]byte(value)); ok {
			t.Errorf("%s is %v; want none", value, got)
		}
	}
}

func TestOtherHeadersAreNoStamps(t *testing.T) {
	for _, name := range []string{"", "x-request-star", "x-request-start2", "x-request-id", "x_request_start", "request-start", "x-amzn-trace-id", "x-cloud-trace-context", "date"} {
		if wait, ok := RequestStart([]byte(name), []byte("t=1788000000.250"), arrival); ok || wait != 0 {
			t.Errorf("%s: %v, %v; want none", name, wait, ok)
		}
	}
}

func FuzzRequestStart(f *testing.F) {
	for _, s := range []string{"t=1788000000.250", "1788000000250", "D=1 t=1788000000250001", "1788000000250000001", "web t=1788000003.5, t=1700000000, t=1788000006.1", "9999999999999999999", "t=", ",", "946684799.9999999999"} {
		f.Add([]byte(s), int64(0))
		f.Add([]byte(s), int64(-5_250_000_000))
	}
	name := []byte("X-Request-Start")
	f.Fuzz(func(t *testing.T, value []byte, later int64) {
		now := arrival.Add(time.Duration(later))
		wait, ok := RequestStart(name, value, now)
		if wait < 0 || wait > maxWait || !ok && wait != 0 {
			t.Fatalf("%q: %v, %v", value, wait, ok)
		}
		if again, still := RequestStart([]byte("x-queue-start"), append([]byte(" junk ,"), value...), now); still != ok || again != wait {
			t.Errorf("%q: %v, %v, behind junk %v, %v", value, wait, ok, again, still)
		}
		// A second later the same stamp has waited a second longer.
		if after, _ := RequestStart(name, value, now.Add(time.Second)); wait > 0 && wait+time.Second <= maxWait && after != wait+time.Second {
			t.Errorf("%q: %v, a second later %v", value, wait, after)
		}
		if !ok || wait == 0 {
			return
		}
		// The stamp that weir found is one in every unit.
		stamp := now.Add(-wait)
		for _, s := range []string{
			fmt.Sprintf("t=%d.%09d", stamp.Unix(), stamp.Nanosecond()), fmt.Sprint(stamp.UnixNano()), fmt.Sprintf("%d.%06d", stamp.UnixMilli(), stamp.Nanosecond()%1e6),
		} {
			if d, _ := RequestStart(name, []byte(s), now); d != wait {
				t.Errorf("%q waited %v, %s waited %v", value, wait, s, d)
			}
		}
	})
}

func TestReadingAStampCostsNoAllocation(t *testing.T) {
	name, value := []byte("X-Request-Start"), []byte("D=3775 t=1788000000250000, t=1788000003.250")
	other := bytes.Repeat([]byte("x"), len(name))
	if n := testing.AllocsPerRun(100, func() {
		RequestStart(name, value, arrival)
		RequestStart(other, value, arrival)
	}); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
}

func BenchmarkRequestStart(b *testing.B) {
	name, value := []byte("X-Request-Start"), []byte("t=1788000000.250")
	b.ReportAllocs()
	for b.Loop() {
		RequestStart(name, value, arrival)
	}
}
