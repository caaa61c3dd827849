package asrsim

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"strings"
	"time"
)

// rawRate is the byte rate of audio without a header: 16 kHz, 16 bit, mono.
const rawRate = 32000

// headLen is how much of a file is kept to find its WAV header.
const headLen = 4096

var errEmpty = errors.New("no audio: send a WAV file, or 16 kHz 16 bit mono samples")

// audio is what is left of a body once it was read.
type audio struct {
	seconds float64
	hash    [sha256.Size]byte
}

// hear reads audio to its end, whatever its length, in constant memory.
func hear(r io.Reader) (audio, error) {
	h := sha256.New()
	var head bytes.Buffer
	read, err := io.Copy(h, io.TeeReader(io.LimitReader(r, headLen), &head))
	if err != nil {
		return audio{}, err
	}
	rest, err := io.Copy(h, r)
	if err != nil {
		return audio{}, err
	}
	if read+rest == 0 {
		return audio{}, errEmpty
	}
	a := audio{seconds: duration(head.Bytes(), read+rest)}
	h.Sum(a.hash[:0])
	return a, nil
}

// duration is the length, in seconds, of a file of which head is the
// beginning. A header that promises more than was sent is not believed.
func duration(head []byte, size int64) float64 {
	rate, offset, length := wavHeader(head)
	if rate == 0 {
		return float64(size) / rawRate
	}
	return float64(max(0, min(length, size-offset))) / float64(rate)
}

// wavHeader finds the byte rate, and the place and length of the samples;
// rate is 0 if head is no WAV file's.
func wavHeader(head []byte) (rate, offset, length int64) {
	if len(head) < 12 || string(head[:4]) != "RIFF" || string(head[8:12]) != "WAVE" {
		return 0, 0, 0
	}
	for at := int64(12); at+8 <= int64(len(head)); {
		name, size := string(head[at:at+4]), int64(binary.LittleEndian.Uint32(head[at+4:]))
		at += 8
		if name == "fmt " && at+12 <= int64(len(head)) {
			rate = int64(binary.LittleEndian.Uint32(head[at+8:]))
		}
		if name == "data" && rate >= 4000 {
			return rate, at, streamed(size)
		}
		at += size + size%2
	}
	return 0, 0, 0
}

// streamed widens a length of 0 or of all ones, which programs write that do
// not know the length beforehand.
func streamed(size int64) int64 {
	if size == 0 || size >= math.MaxUint32-36 {
		return math.MaxInt64
	}
	return size
}

// SynthesizeWAV returns a WAV file of 16 kHz, 16 bit, mono: a voice-like tone
// with pauses. The same length and seed give the same bytes.
func SynthesizeWAV(length time.Duration, seed uint64) []byte {
	samples := int(length.Seconds() * rawRate / 2)
	b := make([]byte, 0, 44+2*samples)
	b = append(b, "RIFF"...)
	b = binary.LittleEndian.AppendUint32(b, uint32(36+2*samples))
	b = append(b, "WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00"...)
	b = binary.LittleEndian.AppendUint32(b, rawRate/2)
	b = binary.LittleEndian.AppendUint32(b, rawRate)
	b = append(b, "\x02\x00\x10\x00data"...)
	b = binary.LittleEndian.AppendUint32(b, uint32(2*samples))
	pitch := 110 + 10*float64(seed%16)
	for i := range samples {
		t := float64(i) / (rawRate / 2)
		loud := max(0, math.Sin(2*math.Pi*2.5*t))
		v := 6000 * loud * (math.Sin(2*math.Pi*pitch*t) + 0.5*math.Sin(6*math.Pi*pitch*t))
		b = binary.LittleEndian.AppendUint16(b, uint16(int16(v)+int16(seed>>4&0xff)))
	}
	return b
}

var vocabulary = strings.Fields(`the water runs over a low wall and its height tells how much river there is
	we measure each minute of speech before it goes on to those who wait for text one voice asks another answers
	morning came late with rain on every roof while someone read numbers from page seven to nine`)

// words is the transcript: about two and a half words for each second.
func (a audio) words() []string {
	n := min(max(1, int(2.5*a.seconds)), 500)
	words := make([]string, n)
	for i := range words {
		words[i] = vocabulary[(int(a.hash[i%len(a.hash)])+7*(i/len(a.hash)))%len(vocabulary)]
	}
	return words
}
