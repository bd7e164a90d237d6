//go:build !linux

package hosttest

import (
	"testing"
	"time"
)

var began = time.Now()

// CPUTime returns the time: on other systems than Linux the tests are alone.
func CPUTime(testing.TB) time.Duration { return time.Since(began) }
