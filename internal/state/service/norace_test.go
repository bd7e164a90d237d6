//go:build linux && !race

package service

const raceDetector = false
