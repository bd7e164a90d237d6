package browser

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/chromedp/chromedp"
)

// TestReports opens the pages that --html writes.
func TestReports(t *testing.T) {
	of := browser(t)
	for name, arguments := range map[string][]string{
		"plan": {"plan", "--model", "llama-3-8b", "--gpu", "H100-80GB", "--gpus", "8", "--fsdp", "2", "--precision",
			"bf16"},
		"fit": {"fit", "--model", "gpt2", "--gpu", "H100-80GB"},
		"large": {"plan", "--model", "llama-3-8b", "--gpu", "H100-80GB", "--gpus", "8", "--nodes", "4",
			"--pipeline-parallel", "32", "--grad-accum", "32", "--seq-len", "512"},
	} {
		t.Run(name, func(t *testing.T) {
			page := filepath.Join(t.TempDir(), "report.html")
			document, stderr, code := run(t, ".", slices.Concat(arguments, []string{"--json", "--html", page})...)
			if code != 0 && code != 3 {
				t.Fatalf("exit code %d: %s", code, stderr)
			}
			p := open(t, of, address(t, page))
			if name != "fit" { // which has no bars
				ready(t, p, page)
			}
			if n := components(t, document); name == "large" && n < 1000 {
				t.Errorf("the large plan has %d components, expected 1,000", n)
			}
			shown(t, p)
			flawless(t, p, "report-"+name)
			p.check(t)
		})
	}
}

// ready: the bars are drawn a second after the page is opened. The best of some counts, as hosts are noisy.
func ready(t *testing.T, p *tab, page string) {
	best := 1e9
	for try := 0; try < 5 && best >= 1000; try++ {
		p.do(t, chromedp.Navigate("about:blank"), chromedp.Navigate(address(t, page)))
		p.wait(t, `document.documentElement.dataset.ready !== undefined`)
		best = min(best, read[float64](t, p, `Number(document.documentElement.dataset.ready)`))
	}
	t.Logf("ready after %.0f ms", best)
	if best >= 1000 {
		late(t, "the report is ready after %.0f ms, expected a second at most", best)
	}
}

// components counts the components of all phases of a document.
func components(t *testing.T, text string) int {
	t.Helper()
	var document struct {
		Devices []struct {
			Phases []struct{ Components []any }
		}
	}
	if err := json.Unmarshal([]byte(text), &document); err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, d := range document.Devices {
		for _, phase := range d.Phases {
			n += len(phase.Components)
		}
	}
	return n
}

// shown looks at a report in both color schemes, on a phone and on paper.
func shown(t *testing.T, p *tab) {
	const ground = `getComputedStyle(document.body).backgroundColor`
	p.scheme(t, "light")
	light := read[string](t, p, ground)
	p.scheme(t, "dark")
	if dark := read[string](t, p, ground); dark == light {
		t.Errorf("light and dark are both %s", dark)
	}
	p.narrow(t)
	p.viewport(t, 1280, 800)
	paper, err := chromedp.Run(p, chromedp.PrintToPDF())
	if err != nil || len(paper) < 10_000 {
		t.Errorf("the report on paper has %d bytes: %v", len(paper), err)
	}
	if *pictures != "" {
		if err := os.WriteFile(filepath.Join(*pictures, "report.pdf"), paper, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
