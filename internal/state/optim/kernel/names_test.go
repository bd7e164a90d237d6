//go:build linux

package kernel

import (
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/base/fault"
)

// TestNamesAreParsed: every name is that of one value, and names that are close get it as an answer.
func TestNamesAreParsed(t *testing.T) {
	for name, parse := range map[string]func(string) (string, error){
		strings.Join(AlgorithmNames(), " "): func(name string) (string, error) {
			a, err := ParseAlgorithm(name)
			return a.String(), err
		},
		strings.Join(StateNames(), " "): func(name string) (string, error) {
			s, err := ParseState(name)
			return s.String(), err
		},
		strings.Join(MomentNames(), " "): func(name string) (string, error) {
			m, err := ParseMoments(name)
			return m.String(), err
		},
		"bf16 fp16 fp32": func(name string) (string, error) {
			of, err := ParseNumberType(name)
			return of.String(), err
		},
	} {
		known := strings.Fields(name)
		for _, name := range known {
			if got, err := parse(name); err != nil || got != name {
				t.Errorf("%q is %q, %v", name, got, err)
			}
		}
		for _, wrong := range []string{"", "quaternion", strings.Join(known, "")} {
			_, err := parse(wrong)
			if err == nil || !strings.Contains(err.Error(), "expected "+fault.OneOf(known...)) {
				t.Errorf("%q: %v", wrong, err)
			}
		}
	}
	if _, err := ParseState("splt"); err == nil || !strings.HasSuffix(err.Error(), `; did you mean "split"?`) {
		t.Error(err)
	}
	if of, err := ParseNumberType("bfloat16"); err == nil || of != dtype.Invalid {
		t.Error(of, err)
	}
}
