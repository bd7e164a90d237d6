package version

import (
	"errors"
	"testing"

	"plimsoll/fault"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]Version{
		"2.4": {2, 4, 0}, "v2.6": {2, 6, 0}, "2.13.0+cu130": {2, 13, 0}, "2.14.0a0+4fdf77b": {2, 14, 0}, "1.10.2": {1, 10, 2}, "2.9+cpu": {2, 9, 0}, "2.5rc1": {2, 5, 0},
		"2.9.0.dev20250811": {2, 9, 0}, "0.18.3": {0, 18, 3},
	} {
		if got, err := Parse(text); got != want || err != nil {
			t.Errorf("%q is %v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "2", "2.", ".4", "two.four", "2.99999999999999999999", "-2.4", "2.x"} {
		if v, err := Parse(text); !errors.As(err, new(*fault.Input)) {
			t.Errorf("%q: %v, %v", text, v, err)
		}
	}
}

func TestAtLeast(t *testing.T) {
	v := Version{2, 13, 1}
	for _, c := range []struct {
		major, minor, patch int
		want                bool
	}{{2, 13, 1, true}, {2, 13, 2, false}, {2, 14, 0, false}, {2, 9, 9, true}, {1, 99, 0, true}, {3, 0, 0, false}} {
		if v.AtLeast(c.major, c.minor, c.patch) != c.want {
			t.Errorf("%v at least %d.%d.%d is not %v", v, c.major, c.minor, c.patch, c.want)
		}
	}
}
