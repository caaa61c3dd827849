package asrsim

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

func le32(n uint32) string { return string(binary.LittleEndian.AppendUint32(nil, n)) }

// wav is a file whose header promises size bytes of samples at a byte rate.
func wav(rate, size uint32, extra string, samples int) string {
	return "RIFF" + le32(0) + "WAVE" + extra + "fmt " + le32(16) + "\x01\x00\x01\x00" + le32(rate/2) + le32(rate) + "\x02\x00\x10\x00" +
		"data" + le32(size) + strings.Repeat("\x01", samples)
}

func TestTheLengthOfAudioIsReadFromItsHeader(t *testing.T) {
	for _, test := range []struct {
		name, body string
		seconds    float64
	}{
		{"raw samples", strings.Repeat("x", 16000), 0.5},
		{"16 kHz", wav(32000, 64000, "", 64000), 2},
		{"44.1 kHz stereo", wav(176400, 88200, "", 88200), 0.5},
		{"chunks before the format", wav(16000, 16000, "LIST"+le32(5)+"abcde\x00", 16000), 1},
		{"bytes after the samples", wav(32000, 32000, "", 40000), 1},
		{"length unknown", wav(32000, 0xffffffff, "", 16000), 0.5},
		{"length zero", wav(32000, 0, "", 16000), 0.5},
		{"cut short", wav(32000, 320000, "", 16000), 0.5},
		{"no byte rate: taken for raw", wav(0, 100, "", 32000-44), 1},
		{"larger than what is kept of the head", wav(32000, 3200000, "", 3200000), 100},
	} {
		for name, r := range map[string]*strings.Reader{"whole": strings.NewReader(test.body), "one byte at a time": strings.NewReader(test.body)} {
			a, err := hear(r)
			if name != "whole" && len(test.body) < 100000 {
				r.Seek(0, 0)
				a, err = hear(iotest.OneByteReader(r))
			}
			if err != nil || a.seconds != test.seconds {
				t.Errorf("%s, %s: %g s, %v: want %g", test.name, name, a.seconds, err, test.seconds)
			}
		}
	}
}

func TestSynthesizedAudioIsAWAVFileOfItsLength(t *testing.T) {
	for _, length := range []time.Duration{0, 250 * time.Millisecond, 3 * time.Second} {
		b := SynthesizeWAV(length, 3)
		a, err := hear(bytes.NewReader(b))
		if err != nil || a.seconds != length.Seconds() {
			t.Errorf("%v: %g s, %v", length, a.seconds, err)
		}
		if !bytes.Equal(b, SynthesizeWAV(length, 3)) {
			t.Errorf("%v: two files of one seed differ", length)
		}
	}
	if bytes.Equal(SynthesizeWAV(time.Second, 1), SynthesizeWAV(time.Second, 2)) {
		t.Error("the seed makes no difference")
	}
}

func FuzzAnyBodyHasALength(f *testing.F) {
	f.Add([]byte(wav(32000, 100, "LIST"+le32(3)+"abc\x00", 100)))
	f.Add([]byte("RIFF\x00\x00\x00\x00WAVEfmt \xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, body []byte) {
		a, err := hear(bytes.NewReader(body))
		if (err != nil) != (len(body) == 0) {
			t.Errorf("error %v for %d bytes", err, len(body))
		}
		if !(a.seconds >= 0 && a.seconds <= float64(len(body))/4000) {
			t.Errorf("%d bytes last %g s", len(body), a.seconds)
		}
		if n := len(a.words()); n < 1 || n > 500 {
			t.Errorf("%d words", n)
		}
	})
}
