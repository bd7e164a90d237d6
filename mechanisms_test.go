package plimsoll

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestMechanismsHaveTheirTests looks up the tests that docs/mechanisms.md names.
func TestMechanismsHaveTheirTests(t *testing.T) {
	var named []string
	page := read(t, "docs/mechanisms.md")
	for _, m := range regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(page, -1) {
		named = append(named, m[1])
	}
	if len(named) < 10 {
		t.Errorf("the page names %d tests", len(named))
	}
	for _, source := range goFiles(t) {
		named = slices.DeleteFunc(named, func(name string) bool {
			return source.isTest() && strings.Contains(source.text, "func "+name+"(t *testing.T)")
		})
	}
	if len(named) > 0 {
		t.Errorf("there are no tests %v", named)
	}
}
