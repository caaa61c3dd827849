package classifier

// trust is how often a rule was right of 1,200 systems that were drawn at
// random, simulated, and labelled by experiment (TestCalibrate prints the
// counts; the systems are in no other test). The first number holds where the
// deciding measure lies less than a quarter beyond its threshold, the second
// further on; they are the same where the counts do not tell them apart. Each
// is (right+1)/(decided+2), so that a rule which was seldom drawn is trusted
// less. A rule that is not here gets rarely.
var trust = map[string][2]float64{
	"always-one":   {0.94, 0.94}, // 118 of 123
	"as-at-rest":   {0.67, 0.96}, // 9 of 13, 115 of 119
	"batch-cap":    {0.72, 0.72}, // 17 of 23
	"batch-delay":  {0.83, 0.83}, // 4 of 4
	"between":      {0.96, 0.96}, // 26 of 26
	"contention":   {0.94, 0.94}, // 28 of 29
	"copies-grew":  {0.62, 0.95}, // 4 of 6, 54 of 56
	"copies-hold":  {0.67, 0.97}, // 5 of 7, 30 of 30
	"forward-grew": {0.98, 0.98}, // 81 of 81
	"gate-free":    {0.84, 0.84}, // 26 of 30
	"gate-idle":    {0.94, 0.94}, // 32 of 33
	"gate-one":     {0.93, 0.93}, // 40 of 42
	"gate-room":    {0.89, 0.89}, // 46 of 51
	"host-grew":    {0.57, 0.86}, // 3 of 5, 24 of 27
	"host-hidden":  {0.86, 0.86}, // 11 of 12
	"linear":       {0.95, 0.95}, // 80 of 83
	"one-cycle":    {0.98, 0.98}, // 92 of 93
	"server-limit": {0.92, 0.92}, // 11 of 11
	"uploads":      {0.98, 0.98}, // 41 of 41

	// Of data that are at fault there is no drawing; the simulator's designed
	// faults are all recognised.
	"impossible-stages": {0.95, 0.95},
	"wrong-unit":        {0.95, 0.95},
	"unsynced":          {0.95, 0.95},
	"too-few":           {0, 0},
}

// rarely is for rules that were drawn too seldom to be counted.
const rarely = 0.7

func trusted(rule string, margin float64) float64 {
	t, ok := trust[rule]
	switch {
	case !ok:
		return rarely
	case margin < 0.25:
		return t[0]
	}
	return t[1]
}
