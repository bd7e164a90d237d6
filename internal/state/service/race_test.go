//go:build linux && race

package service

const raceDetector = true
