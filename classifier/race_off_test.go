//go:build !race

package classifier

const raceOn = false
