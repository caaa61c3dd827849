package evidence

import (
	"fmt"
	"strings"

	"weir/classifier"
)

// joined is an aggregate on its way to a class.
type joined struct{ classifier.Aggregate }

// How far the counts of requests may differ: what ends between the reading of
// the one count and of the other explains a few.
const (
	joinShare = 0.05
	joinSlack = 3
)

// join tells why the server's numbers must not be taken for the class's; "" if
// they may. They may if the server counts as many requests as weir saw
// answered: of that class alone, or of all classes that are work at all. Other
// counts mean that other traffic bypasses weir, or that the page is another's.
func (a *joined) join(class string, before, after map[string]uint64) string {
	var own, all float64
	others := 0
	for name, n := range after {
		d := float64(n - before[name])
		switch {
		case !isWork(name) || d == 0:
		case name == class:
			own = d
			all += d
		default:
			others++
			all += d
		}
	}
	switch {
	case alike(own, a.Requests):
		return ""
	case alike(all, a.Requests):
		a.Classes = others + 1
		return ""
	}
	return fmt.Sprintf("it counts %.0f requests where weir saw %.0f answered, which is more than 5 %% apart: other traffic bypasses weir, or it is another server's page", a.Requests, all)
}

// isWork leaves out probes and lists, which servers do not count.
func isWork(class string) bool {
	for _, method := range []string{"GET ", "HEAD ", "OPTIONS "} {
		if strings.HasPrefix(class, method) {
			return false
		}
	}
	return class != "GET" && class != "HEAD" && class != "OPTIONS"
}

func alike(a, b float64) bool {
	d := a - b
	return d*d <= (max(a, b)*joinShare+joinSlack)*(max(a, b)*joinShare+joinSlack)
}
