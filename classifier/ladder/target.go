package ladder

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// The shapes of a request.
const (
	Multipart = "multipart" // OpenAI's form: the audio in FileField, and Fields
	Raw       = "raw"       // the body is the audio
	JSON      = "json"      // Template with the audio in base64
)

// Field is one field of a form, or one header.
type Field struct{ Name, Value string }

// Target says where requests go and what they look like.
type Target struct {
	URL        string
	Shape      string  // Multipart, Raw, JSON, or a WebSocket's; empty: Raw if the path is /asr, else Multipart
	FileField  string  // of Multipart; empty: file
	Fields     []Field // of Multipart, and of Realtime's session.update
	Template   string  // of JSON and GRPC: {audio} stands for the base64 of the audio; empty: {"audio":"{audio}"}
	Descriptor string  // of GRPC: a file with a FileDescriptorSet; empty: the server's reflection
	Headers    []Field
	Expect     string        // what a good answer holds; see [ParseExpect]
	Timeout    time.Duration // of one request; 0: 5 min
	Paced      bool          // of a WebSocket: the audio goes out at the speed of speech
	Upload     float64       // bytes/s of one upload; 0: as fast as it goes
	Admin      string        // address of weir's admin port, if the URL is a weir's; empty: only Server-Timing tells the stages
}

const (
	defaultTimeout  = 5 * time.Minute
	defaultTemplate = `{"audio":"{audio}"}`
)

// Check fills in the defaults and returns the first mistake with its remedy.
func (t *Target) Check() error {
	u, err := url.Parse(t.URL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" && !(t.webSocket() && (u.Scheme == "ws" || u.Scheme == "wss")) {
		return fmt.Errorf("--url %q is no URL of a transcription: write http://host:port/path, or with a WebSocket's --shape ws://host:port/path", t.URL)
	}
	if t.Paced && !t.webSocket() && t.Shape != GRPC {
		return fmt.Errorf("--paced is for the shapes that stream: funasr, vosk, sherpa, sherpa-offline, realtime or grpc")
	}
	if t.Shape == "" {
		t.Shape = Multipart
		if strings.HasSuffix(u.Path, "/asr") {
			t.Shape = Raw
		}
	}
	if t.FileField == "" {
		t.FileField = "file"
	}
	if t.Timeout <= 0 {
		t.Timeout = defaultTimeout
	}
	switch t.Shape {
	case Multipart, Raw, FunASR, Vosk, Sherpa, SherpaOffline, Realtime:
	case JSON, GRPC:
		if t.Template == "" {
			t.Template = defaultTemplate
		}
		if !strings.Contains(t.Template, "{audio}") || !json.Valid([]byte(t.Template)) {
			return fmt.Errorf(`--template %q is no JSON with {audio} in a string: write {"audio":"{audio}"}`, t.Template)
		}
	default:
		return fmt.Errorf("--shape %q is unknown: use multipart, raw, json, funasr, vosk, sherpa, sherpa-offline, realtime or grpc", t.Shape)
	}
	_, err = ParseExpect(t.Expect)
	return err
}

// webSocket tells that the shape streams.
func (t *Target) webSocket() bool {
	_, ok := dialects[t.Shape]
	return ok
}

// Shown is the URL without its password, for reports and messages.
func (t *Target) Shown() string {
	u, err := url.Parse(t.URL)
	if err != nil {
		return t.URL
	}
	return u.Redacted()
}

// path is the route that classes the observations.
func (t *Target) path() string {
	u, err := url.Parse(t.URL)
	if err != nil || u.Path == "" {
		return "/"
	}
	return u.Path
}

// body is a request's bytes, made once for each clip.
type body struct {
	clip    *Clip
	content []byte
	kind    string // Content-Type
}

func (t *Target) body(c *Clip) (body, error) {
	if t.webSocket() {
		pcm, err := c.samples()
		return body{c, pcm, c.Type}, err
	}
	switch t.Shape {
	case Raw, GRPC:
		return body{c, c.Data, c.Type}, nil
	case JSON:
		text := strings.ReplaceAll(t.Template, "{audio}", base64.StdEncoding.EncodeToString(c.Data))
		return body{c, []byte(text), "application/json"}, nil
	}
	return t.form(c)
}

func (t *Target) form(c *Clip) (body, error) {
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for _, f := range t.Fields {
		if err := w.WriteField(f.Name, f.Value); err != nil {
			return body{}, err
		}
	}
	part, err := w.CreatePart(textproto.MIMEHeader{
		"Content-Disposition": {multipart.FileContentDisposition(t.FileField, c.Name)},
		"Content-Type":        {c.Type},
	})
	if err == nil {
		_, err = part.Write(c.Data)
	}
	if err == nil {
		err = w.Close()
	}
	return body{c, b.Bytes(), w.FormDataContentType()}, err
}

// apply sets the headers; Host is no header for net/http.
func (t *Target) apply(r *http.Request, kind string) {
	r.Header.Set("Content-Type", kind)
	r.Header.Set("User-Agent", "weir-ladder")
	for _, h := range t.Headers {
		if strings.EqualFold(h.Name, "host") {
			r.Host = h.Value
			continue
		}
		r.Header.Set(h.Name, h.Value)
	}
}

// Expect tells whether an answer's body is a good one. A nil Expect takes any.
type Expect func(body []byte) bool

// ParseExpect reads what a good answer holds: a JSON pointer that starts with
// / and must lead to something other than null, "" and false, optionally
// followed by =REGEX for the value there; else a regular expression for the
// whole body. Empty text expects nothing.
func ParseExpect(text string) (Expect, error) {
	if text == "" {
		return nil, nil
	}
	pointer, pattern, isJSON := "", text, strings.HasPrefix(text, "/")
	if isJSON {
		pointer, pattern, _ = strings.Cut(text, "=")
	}
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil, fmt.Errorf("--expect %q: %w: write a JSON pointer such as /text, /text=REGEX, or a regular expression", text, err)
	}
	if !isJSON {
		return re.Match, nil
	}
	return func(body []byte) bool {
		var v any
		if json.Unmarshal(body, &v) != nil {
			return false
		}
		found, ok := follow(v, pointer)
		return ok && re.MatchString(found)
	}, nil
}

// follow walks a JSON pointer (RFC 6901) to a value, as text. Null, false and
// the empty string are as good as nothing.
func follow(v any, pointer string) (text string, ok bool) {
	for step := range strings.SplitSeq(strings.TrimPrefix(pointer, "/"), "/") {
		step = strings.ReplaceAll(strings.ReplaceAll(step, "~1", "/"), "~0", "~")
		switch in := v.(type) {
		case map[string]any:
			v = in[step]
		case []any:
			i, err := strconv.Atoi(step)
			if err != nil || i < 0 || i >= len(in) {
				return "", false
			}
			v = in[i]
		default:
			return "", false
		}
	}
	switch v := v.(type) {
	case nil:
		return "", false
	case bool:
		return "true", v
	case string:
		return v, v != ""
	}
	b, err := json.Marshal(v)
	return string(b), err == nil
}
