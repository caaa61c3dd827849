package ladder

import (
	"fmt"
	"html"
	"math"
	"strconv"
	"strings"
)

// The size of a plot and its margins, in pixels of the drawing.
const (
	chartWidth, chartHeight                          = 560.0, 300.0
	marginLeft, marginRight, marginTop, marginBottom = 62.0, 12.0, 12.0, 44.0
)

// chart is one plot, drawn as SVG. Colours are classes of the page's style,
// c0 to c8; each mark carries its numbers for the pointer and the keyboard.
type chart struct {
	title, xName, yName string
	x, y                axis
	marks               strings.Builder
	legend              []legendEntry
}

type legendEntry struct {
	class, name string
}

// axis maps values to pixels, linearly or by logarithm.
type axis struct {
	from, to float64 // values
	log      bool
	ticks    []float64
	labels   []string // nil: the numbers
}

func (a axis) at(v float64) float64 {
	f, t := a.from, a.to
	if a.log {
		v, f, t = math.Log(max(v, 1e-12)), math.Log(f), math.Log(t)
	}
	if t == f {
		return 0.5
	}
	return min(max((v-f)/(t-f), -0.05), 1.05)
}

func (c *chart) px(v float64) float64 {
	return marginLeft + c.x.at(v)*(chartWidth-marginLeft-marginRight)
}

func (c *chart) py(v float64) float64 {
	return chartHeight - marginBottom - c.y.at(v)*(chartHeight-marginTop-marginBottom)
}

// linear is an axis from 0 with round ticks.
func linear(most float64) axis {
	if !(most > 0) {
		most = 1
	}
	step := math.Pow(10, math.Floor(math.Log10(most/4)))
	for _, m := range []float64{1, 2, 2.5, 5, 10} {
		if most/(step*m) <= 5 {
			step *= m
			break
		}
	}
	a := axis{to: step * math.Ceil(most/step*1.02)}
	for v := 0.0; v <= a.to*1.001; v += step {
		a.ticks = append(a.ticks, v)
	}
	return a
}

// levels is an axis of the values given, by logarithm, with some air.
func levels(values []float64) axis {
	a := axis{log: true, from: math.Inf(1), ticks: values}
	for _, v := range values {
		a.from, a.to = min(a.from, v), max(a.to, v)
	}
	a.from, a.to = a.from/1.15, a.to*1.15
	return a
}

// places is an axis of n equal places with a label each.
func places(labels []string) axis {
	a := axis{from: -0.6, to: float64(len(labels)) - 0.4, labels: labels}
	for i := range labels {
		a.ticks = append(a.ticks, float64(i))
	}
	return a
}

func (c *chart) name(class, text string) {
	c.legend = append(c.legend, legendEntry{class, text})
}

func (c *chart) draw(format string, args ...any) { fmt.Fprintf(&c.marks, format, args...) }

// mark opens a group that tells text on hover and focus.
func (c *chart) mark(text string, shape string) {
	t := html.EscapeString(text)
	c.draw(`<g class="m" tabindex="0" role="img" aria-label="%s" data-tip="%s">%s</g>`, t, t, shape)
}

// line joins points and marks each.
func (c *chart) line(class, name string, x, y []float64, tip func(i int) string) {
	var path strings.Builder
	for i := range x {
		fmt.Fprintf(&path, "%s%.1f,%.1f", map[bool]string{true: "M", false: "L"}[i == 0], c.px(x[i]), c.py(y[i]))
	}
	c.draw(`<path class="l %s" d="%s"/>`, class, path.String())
	for i := range x {
		c.dot(class, x[i], y[i], tip(i))
	}
	c.name(class, name)
}

// dot is a point with a generous place to hit.
func (c *chart) dot(class string, x, y float64, tip string) {
	c.mark(tip, fmt.Sprintf(`<circle class="hit" cx="%.1f" cy="%.1f" r="11"/><circle class="d %s" cx="%.1f" cy="%.1f" r="4"/>`, c.px(x), c.py(y), class, c.px(x), c.py(y)))
}

// whisker is an interval.
func (c *chart) whisker(class string, x, low, high float64) {
	c.draw(`<path class="w %s" d="M%.1f,%.1fV%.1f"/>`, class, c.px(x), c.py(low), c.py(high))
}

// band shades an interval of x, with a line at v.
func (c *chart) band(v, low, high float64, tip string) {
	a, b := c.px(low), c.px(high)
	c.mark(tip, fmt.Sprintf(`<rect class="band" x="%.1f" y="%.1f" width="%.1f" height="%.1f"/><path class="knee" d="M%.1f,%.1fV%.1f"/>`,
		a, marginTop, max(3, b-a), chartHeight-marginTop-marginBottom, c.px(v), marginTop, chartHeight-marginBottom))
}

// bar is a rectangle around the place x from one value to another.
func (c *chart) bar(class string, x, width, from, to float64, tip string) {
	left, right := c.px(x-width/2), c.px(x+width/2)
	top, bottom := c.py(to), c.py(from)
	if bottom-top < 0.05 {
		return
	}
	c.mark(tip, fmt.Sprintf(`<rect class="b %s" x="%.1f" y="%.1f" width="%.1f" height="%.1f"/>`, class, left, top, right-left, bottom-top))
}

// svg is the whole plot.
func (c *chart) svg() string {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg viewBox="0 0 %g %g" role="group" aria-label="%s">`, chartWidth, chartHeight, html.EscapeString(c.title))
	bottom := chartHeight - marginBottom
	for i, v := range c.y.ticks {
		fmt.Fprintf(&b, `<path class="grid" d="M%.1f,%.1fH%.1f"/><text class="t e" x="%.1f" y="%.1f">%s</text>`,
			marginLeft, c.py(v), chartWidth-marginRight, marginLeft-6, c.py(v)+4, html.EscapeString(c.y.label(i)))
	}
	for i, v := range c.x.ticks {
		fmt.Fprintf(&b, `<path class="grid" d="M%.1f,%.1fv5"/><text class="t c" x="%.1f" y="%.1f">%s</text>`,
			c.px(v), bottom, c.px(v), bottom+18, html.EscapeString(c.x.label(i)))
	}
	fmt.Fprintf(&b, `<path class="axis" d="M%.1f,%.1fV%.1fH%.1f"/>`, marginLeft, marginTop, bottom, chartWidth-marginRight)
	fmt.Fprintf(&b, `<text class="t c" x="%.1f" y="%.1f">%s</text>`, (marginLeft+chartWidth-marginRight)/2, chartHeight-8, html.EscapeString(c.xName))
	fmt.Fprintf(&b, `<text class="t c" transform="translate(14 %.1f) rotate(-90)">%s</text>`, (marginTop+bottom)/2, html.EscapeString(c.yName))
	b.WriteString(c.marks.String())
	b.WriteString("</svg>")
	return b.String()
}

func (a axis) label(i int) string {
	if a.labels != nil {
		return a.labels[i]
	}
	return strconv.FormatFloat(a.ticks[i], 'g', 4, 64)
}
