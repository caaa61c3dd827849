package ladder

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"weir/examples/asrsim"
)

// flacFile is the beginning of a FLAC file of 16 kHz with that many samples.
func flacFile(samples uint64) []byte {
	b := append([]byte("fLaC\x80\x00\x00\x22"), make([]byte, 34)...)
	binary.BigEndian.PutUint64(b[18:], 16000<<44|15<<36|samples)
	return b
}

// mp3File has n frames of MPEG 1 layer III, 128 kbit/s, 44.1 kHz, after a tag
// in which a frame header stands.
func mp3File(n int) []byte {
	b := append([]byte("ID3\x04\x00\x00\x00\x00\x00\x08"), "\xff\xfb\x90\x00tag!"...)
	for range n {
		frame := make([]byte, 417)
		copy(frame, "\xff\xfb\x90\x00")
		b = append(b, frame...)
	}
	return b
}

func TestTheLengthOfAudioIsReadFromItsHeader(t *testing.T) {
	wav := asrsim.SynthesizeWAV(2500*time.Millisecond, 1)
	streamed := slices.Clone(wav)
	binary.LittleEndian.PutUint32(streamed[40:], math.MaxUint32)
	for _, c := range []struct {
		name, kind string
		data       []byte
		seconds    float64
	}{
		{"a.wav", "audio/wav", wav, 2.5},
		{"named.mp3", "audio/wav", wav, 2.5}, // the content decides
		{"streamed.wav", "audio/wav", streamed, 2.5},
		{"cut.wav", "audio/wav", wav[:44+32000], 1},
		{"a.flac", "audio/flac", flacFile(40000), 2.5},
		{"a.mp3", "audio/mpeg", mp3File(100), 100 * 1152 / 44100.0},
		{"a.raw", "audio/L16;rate=16000", make([]byte, 64000), 2},
		{"a.txt", "", []byte("no audio at all"), 0},
		{"a.wav", "", []byte("RIFF"), 0},
	} {
		got := NewClip(c.name, c.data)
		if got.Type != c.kind || math.Abs(got.Seconds-c.seconds) > 1e-6 {
			t.Errorf("%s: %q, %g s; want %q, %g s", c.name, got.Type, got.Seconds, c.kind, c.seconds)
		}
	}
}

func TestAFolderOfAudioIsReadInASeededOrder(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a.wav", "b.WAV", "sub/c.wav", "d.flac", "notes.txt"} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		data := asrsim.SynthesizeWAV(time.Second, 1)
		if strings.HasSuffix(name, "flac") {
			data = flacFile(16000)
		}
		if err := os.WriteFile(file, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	order := func(seed uint64) (names []string) {
		clips, err := LoadAudio([]string{dir, filepath.Join(dir, "a.wav")}, seed)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range clips {
			names = append(names, c.Name)
		}
		return names
	}
	if !slices.Equal(order(1), order(1)) {
		t.Error("the same seed gave two orders")
	}
	orders := map[string]bool{}
	for seed := range uint64(20) {
		names := order(seed)
		orders[strings.Join(names, " ")] = true
		if slices.Sort(names); !slices.Equal(names, []string{"a.wav", "b.WAV", "c.wav", "d.flac"}) {
			t.Fatalf("files %q", names)
		}
	}
	if len(orders) < 5 {
		t.Errorf("20 seeds gave %d orders", len(orders))
	}
}

func TestWrongAudioIsNamedWithItsRemedy(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "a.txt")
	empty := filepath.Join(dir, "a.raw")
	_ = os.WriteFile(text, []byte("hello"), 0o644)
	_ = os.WriteFile(empty, nil, 0o644)
	folder := t.TempDir()
	for _, c := range []struct {
		paths []string
		want  string
	}{
		{nil, "give files or folders"},
		{[]string{filepath.Join(dir, "none.wav")}, "no such file or directory: give a WAV"},
		{[]string{text}, "neither WAV, MP3, FLAC"},
		{[]string{empty}, "holds no sound"},
		{[]string{folder}, "holds no .wav"},
	} {
		if _, err := LoadAudio(c.paths, 1); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q", c.paths, err, c.want)
		}
	}
}

func FuzzAudio(f *testing.F) {
	f.Add("a.wav", asrsim.SynthesizeWAV(50*time.Millisecond, 1))
	f.Add("a.flac", flacFile(16000))
	f.Add("a.mp3", mp3File(3))
	f.Add("a.raw", []byte{1, 2, 3})
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		c := NewClip(name, data)
		if c.Seconds < 0 || math.IsNaN(c.Seconds) || math.IsInf(c.Seconds, 0) {
			t.Errorf("%g s", c.Seconds)
		}
	})
}
