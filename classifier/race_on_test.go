//go:build race

package classifier

// raceOn spares the simulations, which have one goroutine, the race detector.
const raceOn = true
