// Package version reads the releases that the behaviour of programs is keyed by.
package version

import (
	"fmt"
	"strconv"
	"strings"

	"plimsoll/fault"
)

// Version is the release of a program, which its behaviour is keyed by.
type Version struct{ Major, Minor, Patch int }

// Parse reads "2.4", "2.13.0+cu130" or "v0.18.3".
func Parse(text string) (Version, error) {
	number, _, _ := strings.Cut(strings.TrimPrefix(text, "v"), "+")
	parts := strings.Split(number, ".")
	var v Version
	fields := []*int{&v.Major, &v.Minor, &v.Patch}
	bad := len(parts) < 2
	for i, part := range parts {
		if i >= len(fields) {
			break // ".dev20250811"
		}
		digits := part[:len(part)-len(strings.TrimLeft(part, "0123456789"))]
		n, err := strconv.Atoi(digits)
		bad = bad || err != nil
		*fields[i] = n
	}
	if bad {
		return Version{}, &fault.Input{What: fmt.Sprintf("%q is no version", text), Mend: `expected numbers such as "2.4" or "0.18.3"`}
	}
	return v, nil
}

// AtLeast says whether the version is this one or a later one.
func (v Version) AtLeast(major, minor, patch int) bool {
	if v.Major != major {
		return v.Major > major
	}
	if v.Minor != minor {
		return v.Minor > minor
	}
	return v.Patch >= patch
}

// IsZero says that no version is known.
func (v Version) IsZero() bool { return v == Version{} }

// String leaves a patch of 0 out.
func (v Version) String() string {
	if v.Patch == 0 {
		return fmt.Sprintf("%d.%d", v.Major, v.Minor)
	}
	return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Patch)
}

// MarshalText writes the version, and nothing for an unknown one.
func (v Version) MarshalText() ([]byte, error) {
	if v.IsZero() {
		return nil, nil
	}
	return []byte(v.String()), nil
}
