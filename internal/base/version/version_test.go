package version

import (
	"errors"
	"testing"

	"pgregory.net/rapid"

	"plimsoll/internal/base/fault"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]Version{
		"2.4": {2, 4, 0}, "v2.6": {2, 6, 0}, "2.13.0+cu130": {2, 13, 0}, "2.14.0a0+4fdf77b": {2, 14, 0},
		"1.10.2": {1, 10, 2}, "2.9+cpu": {2, 9, 0}, "2.5rc1": {2, 5, 0},
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

// TestText writes versions and reads them back.
func TestText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		number := rapid.IntRange(0, 30)
		v := Version{number.Draw(t, "major"), number.Draw(t, "minor"), number.Draw(t, "patch")}
		if again, err := Parse(v.String()); again != v || err != nil {
			t.Fatalf("%v is read back as %v, %v", v, again, err)
		}
		text, err := v.MarshalText()
		if want := v.String(); err != nil || !v.IsZero() && string(text) != want || v.IsZero() && len(text) > 0 {
			t.Fatalf("%v is written as %q, %v", v, text, err)
		}
		w := Version{number.Draw(t, "major"), number.Draw(t, "minor"), number.Draw(t, "patch")}
		if v.AtLeast(w.Major, w.Minor, w.Patch) && w.AtLeast(v.Major, v.Minor, v.Patch) != (v == w) ||
			!v.AtLeast(w.Major, w.Minor, w.Patch) && !w.AtLeast(v.Major, v.Minor, v.Patch) {
			t.Fatalf("%v and %v are not in order", v, w)
		}
	})
	if got := (Version{2, 4, 0}).String() + " " + (Version{2, 4, 1}).String(); got != "2.4 2.4.1" {
		t.Error(got)
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
