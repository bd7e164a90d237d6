package report

import (
	"fmt"
	"image/color"
	"regexp"
	"strings"
	"testing"

	"charm.land/lipgloss/v2"
	"github.com/lucasb-eyer/go-colorful"
)

// sights are how people see colors: the matrices of Machado, Oliveira and Fernandes (2009) for linear RGB, for those
// whose cones of one kind are missing.
var sights = map[string][3][3]float64{
	"all cones":   {{1, 0, 0}, {0, 1, 0}, {0, 0, 1}},
	"deuteranope": {{0.367, 0.861, -0.228}, {0.280, 0.673, 0.047}, {-0.012, 0.043, 0.969}},
	"protanope":   {{0.152, 1.053, -0.205}, {0.115, 0.786, 0.099}, {-0.004, -0.048, 1.052}},
}

// seen returns a color as it looks.
func seen(c colorful.Color, by [3][3]float64) colorful.Color {
	r, g, b := c.LinearRgb()
	var out [3]float64
	for i, row := range by {
		out[i] = row[0]*r + row[1]*g + row[2]*b
	}
	return colorful.LinearRgb(out[0], out[1], out[2]).Clamped()
}

// apart returns the least CIEDE2000 distance of two colors for any sight, from 0 to 100.
func apart(a, b colorful.Color) float64 {
	least := 1.0
	for _, by := range sights {
		least = min(least, seen(a, by).DistanceCIEDE2000(seen(b, by)))
	}
	return 100 * least
}

func colorOf(t *testing.T, hex string) colorful.Color {
	t.Helper()
	c, err := colorful.Hex("#" + hex)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestColorsOfThePage: everybody tells the colors of a stack apart. Neighbours, and what is next where a component
// between them is missing, differ most.
func TestColorsOfThePage(t *testing.T) {
	var stack []colorful.Color
	for i := range len(hues) {
		m := regexp.MustCompile(fmt.Sprintf(`--c%d: #([0-9a-f]{6});`, i)).FindStringSubmatch(pageText)
		if m == nil {
			t.Fatalf("the page has no color %d", i)
		}
		stack = append(stack, colorOf(t, m[1]))
	}
	for i, a := range stack {
		for k, b := range stack[:i] {
			want := map[int]float64{1: 20, 2: 16}[i-k]
			if got := apart(a, b); got < max(want, 11) {
				t.Errorf("colors %d and %d are %.1f apart, expected %.0f", k, i, got, max(want, 11))
			}
		}
		for _, m := range regexp.MustCompile(`--(?:other|unused): #([0-9a-f]{6});`).FindAllStringSubmatch(pageText, -1) {
			if got := apart(a, colorOf(t, m[1])); got < 10 {
				t.Errorf("color %d is %.1f from #%s, expected 10", i, got, m[1])
			}
		}
	}
}

// terminals are the palettes of terminals: red, green, yellow, blue, magenta and cyan.
var terminals = map[string]string{
	"VGA":         "aa0000 00aa00 aa5500 0000aa aa00aa 00aaaa",
	"xterm":       "cd0000 00cd00 cdcd00 0000ee cd00cd 00cdcd",
	"GNOME":       "cc0000 4e9a06 c4a000 3465a4 75507b 06989a",
	"Windows":     "c50f1f 13a10e c19c00 0037da 881798 3a96dd",
	"macOS":       "990000 00a600 999900 0000b2 b200b2 00a6b2",
	"VS Code":     "cd3131 0dbc79 e5e510 2472c8 bc3fbc 11a8cd",
	"docs' image": "d74e6f 00d787 d3e561 8056ff ed61d7 04d7d7",
}

// TestColorsOfTerminals: neighbours in a bar are told apart on usual terminals, and no two pigments are the same.
func TestColorsOfTerminals(t *testing.T) {
	order := []color.Color{lipgloss.Red, lipgloss.Green, lipgloss.Yellow, lipgloss.Blue, lipgloss.Magenta,
		lipgloss.Cyan}
	for name, palette := range terminals {
		at := map[color.Color]colorful.Color{}
		for i, hex := range strings.Fields(palette) {
			at[order[i]] = colorOf(t, hex)
		}
		for i, a := range hues {
			for k, b := range hues[:i] {
				want := map[int]float64{1: 19, 2: 7}[i-k]
				got := apart(at[a.style.GetForeground()], at[b.style.GetForeground()])
				if a.block == b.block && got < max(want, 1) {
					t.Errorf("%s: hues %d and %d are %.1f apart, expected %.0f", name, k, i, got, max(want, 1))
				}
			}
		}
	}
}
