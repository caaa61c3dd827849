// Package page is the live page of the admin port: one HTML file, its style and
// its script, compiled in. It reads /api/verdict, /api/history and
// /api/requests of the same port and loads nothing from anywhere else.
//
// All that comes from traffic (classes, models, targets, error words) is in the
// hands of whoever sends requests. The script puts it on the page as text
// only, and the Content-Security-Policy lets nothing run that is not a file of
// this package.
//
// The charts are drawn by uPlot 1.6.32 (uPlot.LICENSE), the only foreign part.
package page

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"net/http"
	"time"
)

//go:embed index.html page.css page.js uPlot.iife.min.js uPlot.min.css favicon.svg
var files embed.FS

// policy allows what lies beside the page, and images that the script draws.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// types says what is served where, and as what; the system's own table of
// types differs from machine to machine.
var types = map[string]struct{ file, contentType string }{
	"/":                  {"index.html", "text/html; charset=utf-8"},
	"/page.css":          {"page.css", "text/css; charset=utf-8"},
	"/page.js":           {"page.js", "text/javascript; charset=utf-8"},
	"/uPlot.iife.min.js": {"uPlot.iife.min.js", "text/javascript; charset=utf-8"},
	"/uPlot.min.css":     {"uPlot.min.css", "text/css; charset=utf-8"},
	"/favicon.svg":       {"favicon.svg", "image/svg+xml"},
}

type asset struct {
	contentType, etag string
	content           []byte
}

// Handler serves the page at "/", the files that it is made of beside it, and
// 404 for everything else.
func Handler() http.Handler {
	assets := make(map[string]asset, len(types))
	for path, t := range types {
		assets[path] = load(t.file, t.contentType)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		a, ok := assets[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			h.Set("Allow", "GET, HEAD")
			http.Error(w, "the page can only be read", http.StatusMethodNotAllowed)
			return
		}
		h.Set("Content-Type", a.contentType)
		h.Set("Cache-Control", "no-cache") // ask each time: a new weir must not meet an old script
		h.Set("ETag", a.etag)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(a.content))
	})
}

func load(file, contentType string) asset {
	b, err := files.ReadFile(file)
	if err != nil {
		panic(err) // a name in types that is not embedded: every test would see it
	}
	sum := sha256.Sum256(b)
	return asset{contentType, `"` + base64.RawURLEncoding.EncodeToString(sum[:12]) + `"`, b}
}
