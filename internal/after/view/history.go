//go:build linux

package view

import (
	"slices"
	"time"

	"plimsoll/internal/base/ledger"
)

// history is a size over the whole recording, in few points: when there are too many, two become one. A point is the
// largest size of its time.
type history struct {
	points []ledger.Bytes
	width  time.Duration // of a point
}

const (
	mostPoints = 240
	firstWidth = time.Second
)

func (h *history) add(at time.Duration, b ledger.Bytes) {
	if h.width == 0 {
		h.width = firstWidth
	}
	for at/h.width >= mostPoints {
		for i := range h.points {
			h.points[i/2] = max(h.points[i], h.points[i/2*2])
		}
		h.points = h.points[:(len(h.points)+1)/2]
		h.width *= 2
	}
	last := ledger.Bytes(0)
	if n := len(h.points); n > 0 {
		last = h.points[n-1]
	}
	place := int(at / h.width)
	for len(h.points) < place { // no sample was taken in between
		h.points = append(h.points, last)
	}
	if len(h.points) == place {
		h.points = append(h.points, b)
	} else {
		h.points[place] = max(h.points[place], b)
	}
}

var levels = []rune("▁▂▃▄▅▆▇█")

// flat is the share of the largest size that the lowest and the highest level are apart at least. Without it, noise
// would look like growth.
const flat = 20

// spark draws the history in width characters at most.
func (h *history) spark(width int) string {
	n := len(h.points)
	if n == 0 || width <= 0 {
		return ""
	}
	columns := make([]ledger.Bytes, min(n, width))
	for i, b := range h.points {
		column := i * len(columns) / n
		columns[column] = max(columns[column], b)
	}
	least, most := slices.Min(columns), slices.Max(columns)
	least = min(least, most-most/flat)
	text := make([]rune, len(columns))
	for i, b := range columns {
		level := 0
		if most > least {
			level = int(float64(b-least) / float64(most-least) * float64(len(levels)-1))
		}
		text[i] = levels[level]
	}
	return string(text)
}

// bar draws how much of a whole is used.
func bar(used, whole ledger.Bytes, width int) string {
	eighths := []rune(" ▏▎▍▌▋▊▉")
	filled := 0
	if whole > 0 {
		filled = int(min(1, max(0, float64(used)/float64(whole))) * float64(width*8))
	}
	text := slices.Repeat([]rune{'█'}, filled/8)
	if len(text) < width {
		text = append(text, eighths[filled%8])
	}
	return string(append(text, slices.Repeat([]rune{' '}, width-len(text))...))
}
