package ladder

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Clip is one audio file, held in memory.
type Clip struct {
	Name    string // the file's name, without its folder
	Data    []byte // the whole file
	Type    string // media type
	Seconds float64
}

// maxAudio bounds what LoadAudio holds, in bytes.
const maxAudio = 1 << 30

var mediaTypes = map[string]string{
	".wav": "audio/wav", ".mp3": "audio/mpeg", ".flac": "audio/flac", ".raw": "audio/L16;rate=16000", ".pcm": "audio/L16;rate=16000",
}

// LoadAudio reads files, and the audio files of folders (WAV, MP3, FLAC, and
// .raw or .pcm of 16 kHz, 16 bit, mono), and puts them in an order that
// depends on seed and on nothing else.
func LoadAudio(paths []string, seed uint64) ([]Clip, error) {
	if len(paths) == 0 {
		return nil, errors.New("no audio: give files or folders with --audio")
	}
	files, err := listAudio(paths)
	if err != nil {
		return nil, err
	}
	var clips []Clip
	total := 0
	for _, file := range files {
		c, err := loadClip(file)
		if err != nil {
			return nil, err
		}
		if total += len(c.Data); total > maxAudio {
			return nil, fmt.Errorf("the audio is larger than %d MiB, which is held in memory: give fewer files", maxAudio>>20)
		}
		clips = append(clips, c)
	}
	dice := rand.New(rand.NewPCG(seed, 0xa0d10))
	dice.Shuffle(len(clips), func(i, j int) { clips[i], clips[j] = clips[j], clips[i] })
	return clips, nil
}

func listAudio(paths []string) (files []string, err error) {
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("audio %q: %w: give a WAV, MP3 or FLAC file, or a folder of them", path, errors.Unwrap(err))
		}
		if !info.IsDir() {
			files = append(files, path)
			continue
		}
		found := len(files)
		err = filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
			if err == nil && d.Type().IsRegular() && mediaTypes[strings.ToLower(filepath.Ext(p))] != "" {
				files = append(files, p)
			}
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("audio folder %q: %w", path, err)
		}
		if len(files) == found {
			return nil, fmt.Errorf("audio folder %q holds no .wav, .mp3, .flac, .raw or .pcm file", path)
		}
	}
	slices.Sort(files)
	return slices.Compact(files), nil
}

func loadClip(file string) (Clip, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return Clip{}, fmt.Errorf("audio: %w", err)
	}
	c := NewClip(filepath.Base(file), data)
	if c.Type == "" {
		return Clip{}, fmt.Errorf("audio %q is neither WAV, MP3, FLAC nor named .raw or .pcm: convert it", file)
	}
	if c.Seconds <= 0 {
		return Clip{}, fmt.Errorf("audio %q holds no sound: its header says %d bytes make 0 s", file, len(data))
	}
	return c, nil
}

// NewClip takes the type of audio from its first bytes, or else from the
// name's extension. Type is empty and Seconds 0 for what is not known.
func NewClip(name string, data []byte) Clip {
	c := Clip{Name: name, Data: data}
	switch {
	case len(data) >= 12 && string(data[:4]) == "RIFF" && string(data[8:12]) == "WAVE":
		c.Type, c.Seconds = "audio/wav", wavSeconds(data)
	case len(data) >= 4 && string(data[:4]) == "fLaC":
		c.Type, c.Seconds = "audio/flac", flacSeconds(data)
	case isMP3(data):
		c.Type, c.Seconds = "audio/mpeg", mp3Seconds(data)
	default:
		if t := mediaTypes[strings.ToLower(filepath.Ext(name))]; strings.HasPrefix(t, "audio/L16") {
			c.Type, c.Seconds = t, float64(len(data))/rawRate
		}
	}
	return c
}

// rawRate is the byte rate of samples without a header.
const rawRate = 32000

// wavSeconds walks the chunks. A data chunk that promises more than the file
// holds, as streaming writers leave it, counts for what is there.
func wavSeconds(b []byte) float64 {
	rate, _, n := wavData(b)
	if rate == 0 {
		return 0
	}
	return float64(n) / float64(rate)
}

// wavData finds the byte rate and the place and length of the samples.
func wavData(b []byte) (rate uint32, at, n int) {
	for at := 12; at+8 <= len(b); {
		name, size := string(b[at:at+4]), int(binary.LittleEndian.Uint32(b[at+4:]))
		at += 8
		if name == "fmt " && at+12 <= len(b) {
			rate = binary.LittleEndian.Uint32(b[at+8:])
		}
		if name == "data" {
			if size == 0 {
				size = len(b)
			}
			return rate, at, min(size, len(b)-at)
		}
		at += size + size%2
	}
	return 0, 0, 0
}

// flacSeconds reads STREAMINFO: 20 bits of sample rate, 36 bits of samples.
func flacSeconds(b []byte) float64 {
	if len(b) < 8+18 || b[4]&0x7f != 0 {
		return 0
	}
	v := binary.BigEndian.Uint64(b[8+10:])
	rate, samples := v>>44, v&(1<<36-1)
	if rate == 0 {
		return 0
	}
	return float64(samples) / float64(rate)
}

func isMP3(b []byte) bool {
	if len(b) >= 3 && string(b[:3]) == "ID3" {
		return true
	}
	_, size := mp3Frame(b)
	return size > 0
}

var (
	mp3Rates  = [4]int{44100, 48000, 32000, 0}
	mp3KbitV1 = [16]int{0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0}
	mp3KbitV2 = [16]int{0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0}
)

// mp3Frame reads the header of a layer III frame: its length in seconds and
// in bytes; size is 0 if it is none.
func mp3Frame(b []byte) (seconds float64, size int) {
	if len(b) < 4 || b[0] != 0xff || b[1]&0xe0 != 0xe0 || b[1]>>1&3 != 1 {
		return 0, 0
	}
	version, rate := b[1]>>3&3, mp3Rates[b[2]>>2&3]
	kbit, samples := mp3KbitV2[b[2]>>4], 576
	switch version {
	case 3:
		kbit, samples = mp3KbitV1[b[2]>>4], 1152
	case 2:
		rate /= 2
	case 0:
		rate /= 4
	default:
		return 0, 0
	}
	if rate == 0 || kbit == 0 {
		return 0, 0
	}
	return float64(samples) / float64(rate), samples/8*kbit*1000/rate + int(b[2]>>1&1)
}

// mp3Seconds adds up the frames, from the end of the ID3 tag.
func mp3Seconds(b []byte) (seconds float64) {
	if len(b) >= 10 && string(b[:3]) == "ID3" {
		tag := int(b[6]&0x7f)<<21 | int(b[7]&0x7f)<<14 | int(b[8]&0x7f)<<7 | int(b[9]&0x7f)
		b = b[min(len(b), 10+tag):]
	}
	for len(b) >= 4 {
		d, size := mp3Frame(b)
		if size == 0 {
			b = b[1:]
			continue
		}
		seconds += d
		b = b[min(size, len(b)):]
	}
	return seconds
}
