package classifier

import (
	"math"
	"time"
)

// The evidence that a slope needs: executions, variance of ln batch (below,
// the batch varied by less than 15 %), and width of the interval.
const (
	minExecutions = 20
	minSpread     = 0.02
	maxWidth      = 0.6
)

// moments are the weighted sums of one regression y on x. They add up over
// windows and over replicas.
type moments struct{ w, x, y, xx, xy, yy float64 }

func (m *moments) add(w, x, y float64) {
	m.w += w
	m.x += w * x
	m.y += w * y
	m.xx += w * x * x
	m.xy += w * x * y
	m.yy += w * y * y
}

func (m *moments) merge(o *moments) {
	m.w += o.w
	m.x += o.x
	m.y += o.y
	m.xx += o.xx
	m.xy += o.xy
	m.yy += o.yy
}

func (m *moments) scale(f float64) {
	m.w *= f
	m.x *= f
	m.y *= f
	m.xx *= f
	m.xy *= f
	m.yy *= f
}

// within is the regression with a constant of its own in each cell (fixed
// effects): the sums of squares are taken around each cell's mean, so that
// cells of long audio with large batches do not pass for a slope.
type within struct{ n, cells, sxx, sxy, syy, x, y float64 }

func (a *within) cell(m *moments) {
	if m.w <= 0 {
		return
	}
	a.n += m.w
	a.cells++
	a.x += m.x
	a.y += m.y
	a.sxx += max(0, m.xx-m.x*m.x/m.w)
	a.sxy += m.xy - m.x*m.y/m.w
	a.syy += max(0, m.yy-m.y*m.y/m.w)
}

func (a *within) dof() float64 { return a.n - a.cells - 1 }

// slope returns the estimate with Student's 95 % interval. It is OK if the
// points are enough, x varied, and the interval is narrow.
func (a *within) slope() Estimate {
	e := Estimate{N: int(math.Round(a.n))}
	dof := a.dof()
	if dof <= 0 || a.sxx <= 1e-9 {
		return e
	}
	e.Value = a.sxy / a.sxx
	half := student95(dof) * math.Sqrt(max(0, a.syy-e.Value*a.sxy)/dof/a.sxx)
	e.CI95 = [2]float64{e.Value - half, e.Value + half}
	e.OK = a.n >= minExecutions && a.sxx/dof >= minSpread && 2*half <= maxWidth
	return e
}

// student95 is the 97.5 % quantile of Student's t, by the Cornish–Fisher
// expansion (Abramowitz and Stegun 26.7.5); within 0.1 % from 10 degrees of
// freedom, and too small by less than 10 % from 3.
func student95(dof float64) float64 {
	const z = 1.959964
	return z + (z*z*z+z)/(4*dof) + (5*z*z*z*z*z+16*z*z*z+3*z)/(96*dof*dof) +
		(3*math.Pow(z, 7)+19*math.Pow(z, 5)+17*z*z*z-15*z)/(384*dof*dof*dof)
}

// fit holds the forward pass against x (batch or in-flight) for one length
// cell: in logarithms for the elasticity, and as it is for the line.
type fit struct{ log, plain moments }

// add counts one request with weight 1/batch, so that the requests of one
// execution weigh one together. seconds is the forward time.
func (f *fit) add(weight, x, seconds float64) {
	f.log.add(weight, math.Log(x), math.Log(max(seconds*1e6, 1)))
	f.plain.add(weight, x, seconds)
}

func (f *fit) merge(o *fit) { f.log.merge(&o.log); f.plain.merge(&o.plain) }

func (f *fit) scale(by float64) { f.log.scale(by); f.plain.scale(by) }

// fits are the length cells of one regression.
type fits [numCells]fit

func (f *fits) merge(o *fits) {
	for i := range f {
		f[i].merge(&o[i])
	}
}

func (f *fits) scale(by float64) {
	for i := range f {
		f[i].scale(by)
	}
}

// line fits the cells together. widen is added to each side of the interval,
// for what cells of one octave leave of the length's influence.
func (f *fits) line(against string, widen float64) Line {
	var log, plain within
	for i := range f {
		log.cell(&f[i].log)
		plain.cell(&f[i].plain)
	}
	if log.n <= 0 {
		return Line{}
	}
	e := log.slope()
	l := Line{Elasticity: e.Value, CI95: e.CI95, N: e.N, Against: against, OK: e.OK}
	if l.OK && widen > 0 {
		l.CI95[0], l.CI95[1] = l.CI95[0]-widen, l.CI95[1]+widen
	}
	l.straight(plain)
	return l
}

// straight fills in the line itself and its elasticity at the mean batch,
// d ln f / d ln x = b x / (a + b x).
func (l *Line) straight(a within) {
	if a.sxx <= 1e-9 {
		return
	}
	slope := a.sxy / a.sxx
	x, y := a.x/a.n, a.y/a.n
	l.Slope, l.Intercept = seconds(slope), seconds(y-slope*x)
	if y > 0 {
		l.AtMean = slope * x / y
	}
}

func seconds(s float64) time.Duration {
	return time.Duration(min(max(s, -maxSpan.Seconds()), maxSpan.Seconds()) * 1e9)
}

// room is what a line says of batching: whether a larger batch costs nothing,
// or as much as it brings.
type room int

const (
	roomUnknown room = iota
	roomFree         // the interval of the elasticity lies below the threshold
	roomLinear       // above it
	roomUnclear      // across it
)

func (l Line) room(elastic float64) room {
	switch {
	case !l.OK:
		return roomUnknown
	case l.CI95[1] < elastic:
		return roomFree
	case l.CI95[0] > elastic:
		return roomLinear
	}
	return roomUnclear
}

// at is the line's forward time for x.
func (l Line) at(x float64) time.Duration {
	return max(0, l.Intercept+time.Duration(float64(l.Slope)*x))
}
