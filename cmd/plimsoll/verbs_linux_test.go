package main

import (
	"os"
	"strings"
	"testing"
)

// TestVerbsAreEverywhere: where a verb cannot run, it says why.
func TestVerbsAreEverywhere(t *testing.T) {
	elsewhere, err := os.ReadFile("verbs_other.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range linuxCommands() {
		if !strings.Contains(string(elsewhere), `{"`+c.Name()+`", "`) {
			t.Errorf("verbs_other.go does not say what %s needs Linux for", c.Name())
		}
	}
}
