package page

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"io"
	"regexp"
	"strings"
	"testing"

	"plimsoll/internal/show/report"
)

// TestPageHoldsTheProgram: a browser finds the program in the page, and its policy allows the script beside it.
func TestPageHoldsTheProgram(t *testing.T) {
	module := bytes.Repeat([]byte("\x00asm<&+"), 1000)
	var out strings.Builder
	if err := Write(&out, Program{Module: module, Support: "// support", Version: "<1.2>"}); err != nil {
		t.Fatal(err)
	}
	text := out.String()
	packed := between(t, text, `<script type="application/octet-stream" id="program">`)
	compressed, err := base64.StdEncoding.DecodeString(packed)
	if err != nil {
		t.Fatal(err)
	}
	r, err := gzip.NewReader(bytes.NewReader(compressed))
	if err != nil {
		t.Fatal(err)
	}
	if found, err := io.ReadAll(r); err != nil || !bytes.Equal(found, module) {
		t.Errorf("the page holds another program: %v", err)
	}
	if worker := between(t, text, `<script type="text/plain" id="worker">`); !strings.HasPrefix(worker, "// support") {
		t.Errorf("the worker begins with %.40q", worker)
	}
	if hash := report.ScriptHash(between(t, text, "<script>")); !strings.Contains(text, "'"+hash+"'") {
		t.Errorf("the policy does not allow the script of the page, %s", hash)
	}
	if !strings.Contains(text, "Version &lt;1.2&gt;.") {
		t.Error("the page does not show its version")
	}
	if address := regexp.MustCompile(`(?:src|href)="[^d#]`).FindString(text); address != "" {
		t.Errorf("the page loads %s", address)
	}
}

// between returns the text of the element that begins with a tag.
func between(t *testing.T, text, tag string) string {
	t.Helper()
	_, rest, found := strings.Cut(text, tag)
	inner, _, closed := strings.Cut(rest, "</script>")
	if !found || !closed {
		t.Fatalf("the page has no %s", tag)
	}
	return inner
}
