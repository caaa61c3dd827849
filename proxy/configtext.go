package proxy

import (
	"fmt"
	"io"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v4"
)

const usageHead = `weir serve stands in front of an ASR server.

  weir serve --server http://127.0.0.1:8000 --listen :8080

Each key can be set as a flag (--max-queue-size 64), in the environment
(WEIR_MAX_QUEUE_SIZE=64) or in a file (max_queue_size: 64); a flag goes before
the environment, and that before the file. Lists and maps are YAML everywhere:
--routes '[/asr]' --thresholds '{queue_share: 0.4}'. Durations have a unit.

  --config FILE         The file, in YAML; also WEIR_CONFIG. It is read again
                        when it changes, and on SIGHUP. Keys marked * take
                        effect at the next start.
`

const usageMargin = 24 // the column of the help

// Usage writes what can be set, for a terminal of 80 columns.
func Usage(w io.Writer) {
	fmt.Fprint(w, usageHead)
	defaults := reflect.ValueOf(DefaultConfig())
	for _, f := range fieldsOf(defaults.Type()) {
		if group := f.Tag.Get("group"); group != "" {
			fmt.Fprintf(w, "\n%s\n", group)
		}
		help := f.Tag.Get("help") + " Default: " + inline(defaults.FieldByIndex(f.Index)) + "."
		name := "  " + flagName(keyOf(f))
		if f.Tag.Get("restart") != "" {
			name += " *"
		}
		fmt.Fprintf(w, "%-*s%s\n", usageMargin-1, name, fill(help))
	}
}

// fill breaks text into lines that stand in the right column.
func fill(text string) string {
	var b strings.Builder
	column := usageMargin - 1
	for word := range strings.FieldsSeq(text) {
		if column+1+len(word) > 80 {
			b.WriteString("\n" + strings.Repeat(" ", usageMargin-1))
			column = usageMargin - 1
		}
		b.WriteString(" " + word)
		column += 1 + len(word)
	}
	return b.String()
}

// inline writes a value as YAML in one line.
func inline(v reflect.Value) string {
	var n yaml.Node
	err := n.Encode(v.Interface())
	if err == nil {
		setFlow(&n)
		var text []byte
		if text, err = yaml.Dump(&n, yaml.WithV3Defaults(), yaml.WithLineWidth(-1)); err == nil {
			return strings.TrimSpace(string(text))
		}
	}
	return fmt.Sprintf("# %v", err) // cannot be: all values are plain
}

func setFlow(n *yaml.Node) {
	if n.Kind != yaml.ScalarNode {
		n.Style = yaml.FlowStyle
	}
	for _, c := range n.Content {
		setFlow(c)
	}
}

// Print writes the configuration as a file that would make the same one, with
// a comment after each value that tells where it came from.
func (c Config) Print(w io.Writer) {
	from := c.loaded
	if from == nil {
		from = &loaded{}
	}
	from.print(w, "", "", reflect.ValueOf(c))
}

func (l *loaded) print(w io.Writer, indent, path string, v reflect.Value) {
	for _, f := range fieldsOf(v.Type()) {
		value, whole := v.FieldByIndex(f.Index), strings.TrimPrefix(path+"."+keyOf(f), ".")
		start, from := indent+keyOf(f)+":", l.placeAt(whole).String()
		switch {
		case value.Kind() == reflect.Struct:
			fmt.Fprintln(w, start)
			l.print(w, indent+"  ", whole, value)
		case value.Kind() == reflect.Slice && value.Len() > 0:
			fmt.Fprintf(w, "%-39s # %s\n", start, from)
			for i := range value.Len() {
				fmt.Fprintf(w, "%s  - %s\n", indent, inline(value.Index(i)))
			}
		default:
			fmt.Fprintf(w, "%-39s # %s\n", start+" "+inline(value), from)
		}
	}
}
