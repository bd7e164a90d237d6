package ledger

import (
	"fmt"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
)

// Bytes is a size or a difference of sizes: an integer in JSON, binary units in
// text.
type Bytes int64

// Binary units.
const (
	KiB Bytes = 1 << 10
	MiB Bytes = 1 << 20
	GiB Bytes = 1 << 30
	TiB Bytes = 1 << 40
)

// String returns the size with at least three significant digits: "512 B",
// "12.0 KiB", "6.44 GiB", "1.28 TiB".
func (b Bytes) String() string {
	magnitude := uint64(b)
	if b < 0 {
		magnitude = -magnitude
	}
	sign := ""
	if b < 0 {
		sign = "-"
	}
	if magnitude < 1024 {
		return fmt.Sprintf("%s%d B", sign, magnitude)
	}
	value, unit := float64(magnitude)/1024, 0
	// From 1023.5 on it would print as "1024": take the next unit.
	for value >= 1023.5 && unit < len(units)-1 {
		value, unit = value/1024, unit+1
	}
	digits := 0
	switch {
	case value < 9.995:
		digits = 2
	case value < 99.95:
		digits = 1
	}
	return sign + strconv.FormatFloat(value, 'f', digits, 64) + " " + units[unit]
}

// ParseBytes reads a size such as "79.1GiB", "512 GB", "24g" or "1073741824". A unit
// that ends in B without an i is decimal. A letter alone is binary.
func ParseBytes(text string) (Bytes, error) {
	trimmed := strings.TrimSpace(text)
	number := strings.TrimRight(trimmed, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
	unit := strings.ToLower(strings.TrimSpace(trimmed[len(number):]))
	value, err := strconv.ParseFloat(number, 64)
	factor, ok := unitFactors[unit]
	if err != nil || !ok || !(value >= 0) || value*factor >= 1<<62 {
		if decimal := strings.Replace(trimmed, ",", ".", 1); strings.Count(trimmed, ",") == 1 && decimal != trimmed {
			if _, err := ParseBytes(decimal); err == nil && !strings.HasSuffix(number, ",") {
				return 0, fault.Inputf("%q is no size, expected a number with a unit such as 80GiB", text).
					WithHint("write " + decimal + ": a point, and no comma, is before fractions")
			}
		}
		return 0, fmt.Errorf("%q is no size, expected a number with a unit such as 80GiB", text)
	}
	return Bytes(value * factor), nil
}

var unitFactors = func() map[string]float64 {
	m := map[string]float64{"": 1, "b": 1}
	for i, letter := range []string{"k", "m", "g", "t", "p", "e"} {
		binary, decimal := float64(int64(1)<<(10*(i+1))), 1.0
		for range i + 1 {
			decimal *= 1000
		}
		m[letter], m[letter+"ib"], m[letter+"b"] = binary, binary, decimal
	}
	return m
}()

// Exact returns the size with every digit, in groups of three: "6,916,458,752 B".
func (b Bytes) Exact() string { return Count(int64(b)) + " B" }

// Signed returns String with a sign in front of every number but zero.
func (b Bytes) Signed() string {
	if b > 0 {
		return "+" + b.String()
	}
	return b.String()
}

var units = [...]string{"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}

// Plural returns a number and what it counts: "1 rank", "2 ranks", "2 processes".
func Plural(n int, noun string) string {
	switch {
	case n == 1:
	case strings.HasSuffix(noun, "s"):
		noun += "es"
	default:
		noun += "s"
	}
	return strconv.Itoa(n) + " " + noun
}

// Count returns an integer in groups of three digits: "494,032,768".
func Count(n int64) string {
	s := strconv.FormatInt(n, 10)
	sign := ""
	if s[0] == '-' {
		sign, s = "-", s[1:]
	}
	groups := []string{}
	for len(s) > 3 {
		groups = append([]string{s[len(s)-3:]}, groups...)
		s = s[:len(s)-3]
	}
	return sign + strings.Join(append([]string{s}, groups...), ",")
}
