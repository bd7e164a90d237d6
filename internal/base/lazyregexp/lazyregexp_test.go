package lazyregexp

import "testing"

// TestWhenItCompiles: a program does when it first uses an expression, and a test at once.
func TestWhenItCompiles(t *testing.T) {
	panics := func(do func()) (panicked bool) {
		defer func() { panicked = recover() != nil }()
		do()
		return false
	}
	if !panics(func() { New("(") }) {
		t.Error("a test does not find an expression that is not well formed")
	}
	inTest = false
	defer func() { inTest = true }()
	broken := New("(")
	if !panics(func() { broken.MatchString("") }) {
		t.Error("an expression that is not well formed is used")
	}
	if whole := New("a(.)"); whole.FindStringSubmatch("xab")[1] != "b" || whole.MatchString("b") {
		t.Error("the expression is not the one that was given")
	}
}
