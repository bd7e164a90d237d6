// Package version parses the releases of programs whose behaviour depends on
// them.
package version

import (
	"fmt"
	"strconv"
	"strings"

	"plimsoll/internal/base/fault"
)

// Version is the release of a program.
type Version struct{ Major, Minor, Patch int }

// Parse parses versions such as "2.4", "2.13.0+cu130" and "v0.18.3".
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
		return Version{}, fault.Inputf("%q is no version", text).WithHint(`expected numbers such as "2.4" or "0.18.3"`)
	}
	return v, nil
}

// AtLeast reports whether the version is the given one or later.
func (v Version) AtLeast(major, minor, patch int) bool {
	if v.Major != major {
		return v.Major > major
	}
	if v.Minor != minor {
		return v.Minor > minor
	}
	return v.Patch >= patch
}

// IsZero reports whether the version is unknown.
func (v Version) IsZero() bool { return v == Version{} }

// String returns "major.minor", or "major.minor.patch" if the patch is not 0.
func (v Version) String() string {
	if v.Patch == 0 {
		return fmt.Sprintf("%d.%d", v.Major, v.Minor)
	}
	return fmt.Sprintf("%d.%d.%d", v.Major, v.Minor, v.Patch)
}

// MarshalText returns the version, or nothing if it is unknown.
func (v Version) MarshalText() ([]byte, error) {
	if v.IsZero() {
		return nil, nil
	}
	return []byte(v.String()), nil
}
