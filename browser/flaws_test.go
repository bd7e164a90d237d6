package browser

import (
	_ "embed"
	"fmt"
	"testing"
)

//go:embed flaws.js
var findFlaws string

// sizes are a phone and a laptop.
var sizes = map[string][2]int64{"phone": {390, 844}, "laptop": {1280, 800}}

// flawless reports texts of a page that are cut off, fields that overlap, and colors with too little contrast, on a
// phone and a laptop, in both color schemes. Pictures of what it saw are written under the name.
func flawless(t *testing.T, p *tab, name string) {
	t.Helper()
	for size, pixels := range sizes {
		p.viewport(t, pixels[0], pixels[1])
		for _, scheme := range []string{"light", "dark"} {
			p.scheme(t, scheme)
			for _, flaw := range read[[]string](t, p, findFlaws) {
				t.Errorf("%s, %s: %s", size, scheme, flaw)
			}
			p.fullPicture(t, fmt.Sprintf("%s-%s-%s.png", name, size, scheme))
		}
	}
	p.scheme(t, "light")
	p.viewport(t, 1280, 800)
}
