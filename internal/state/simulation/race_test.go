//go:build race

package simulation

// raced says that the race detector has goroutines run in an order of its own.
const raced = true
