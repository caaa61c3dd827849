package ladder

import (
	_ "embed"
	"html/template"
	"io"
	"strings"
)

//go:embed report.html
var reportPage string

var reportTemplate = template.Must(template.New("report").Parse(reportPage))

type htmlTable struct {
	Title string
	Head  []string
	Rows  [][]string
}

type htmlPlot struct {
	Title  string
	SVG    template.HTML // made by chart, which escapes its texts
	Legend []htmlLegend
}

type htmlLegend struct{ Class, Name string }

type htmlLine struct{ Label, Text string }

// HTML writes the report as one page that needs no network.
func (s *Summary) HTML(w io.Writer, lang string) error {
	data := struct {
		*Summary
		Lang, Cause  string
		VerdictLabel string
		Tables       []htmlTable
		Plots        []htmlPlot
		Lines        []htmlLine
	}{Summary: s, Lang: "en", Cause: "unknown", VerdictLabel: say(lang, "Verdict")}
	if lang == Chinese {
		data.Lang = "zh-CN"
	}
	if s.Verdict != nil {
		data.Cause = string(s.Verdict.Cause)
	}
	for _, t := range s.tables(lang) {
		data.Tables = append(data.Tables, htmlTable{t.title, t.head, t.rows})
	}
	for _, c := range s.plots() {
		p := htmlPlot{Title: c.title, SVG: template.HTML(c.svg())}
		for _, l := range c.legend {
			p.Legend = append(p.Legend, htmlLegend{l.class, l.name})
		}
		data.Plots = append(data.Plots, p)
	}
	for _, l := range s.lines(lang) {
		data.Lines = append(data.Lines, htmlLine{strings.TrimPrefix(strings.TrimPrefix(l[0], "-"), " "), l[1]})
	}
	return reportTemplate.Execute(w, data)
}
