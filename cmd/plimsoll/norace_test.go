//go:build linux && !race

package main

// raceDetector is true where the tests run under the race detector, and so does the program that they start.
const raceDetector = false
