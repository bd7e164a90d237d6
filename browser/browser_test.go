package browser

import (
	"context"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

var (
	program  = flag.String("program", "../bin/plimsoll", "the program")
	pageFile = flag.String("page", "../bin/plimsoll.html", "the page with the planner")
	pictures = flag.String("pictures", "", "write pictures to this folder")
	details  = flag.String("details", "", "write pictures of whole pages at all sizes to this folder")
)

// tab is a page in a browser, with what went wrong in it.
type tab struct {
	context.Context
	lock     sync.Mutex
	faults   []string // errors on the console, and exceptions
	requests []string // addresses that the page asked the network for
}

// browser starts Chromium. It ends with the test.
func browser(t *testing.T) context.Context {
	t.Helper()
	found := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			found = path
			break
		}
	}
	if found == "" {
		if os.Getenv("CI") != "" {
			t.Fatal("Chromium is not installed: make test-browser installs it on Debian as root")
		}
		t.Skip("Chromium is not installed")
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(found),
		chromedp.WSURLReadTimeout(time.Minute))
	allocated, release := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(release)
	started, end := chromedp.NewContext(allocated)
	t.Cleanup(end)
	if err := chromedp.Do(started); err != nil {
		t.Fatal(err)
	}
	return started
}

// open opens an address in a tab.
func open(t *testing.T, of context.Context, at string) *tab {
	t.Helper()
	inTab, end := chromedp.NewContext(of)
	t.Cleanup(end)
	opened := &tab{Context: inTab}
	opened.do(t)
	if err := chromedp.Listen(inTab, opened.listen); err != nil {
		t.Fatal(err)
	}
	command(t, opened, network.Enable, network.EnableParams{})
	command(t, opened, log.Enable, cdp.Empty{})
	opened.viewport(t, 1280, 800)
	opened.do(t, chromedp.Navigate(at))
	return opened
}

// command sends a command of the DevTools protocol.
func command[P, R any](t *testing.T, p *tab, method cdp.Command[P, R], parameters P) {
	t.Helper()
	p.do(t, chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := cdp.Call(ctx, target, method, parameters)
		return err
	}))
}

func address(t *testing.T, path string) string {
	t.Helper()
	whole, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return "file://" + whole
}

func (p *tab) listen(event any) {
	p.lock.Lock()
	defer p.lock.Unlock()
	switch event := event.(type) {
	case *runtime.EventExceptionThrown:
		p.faults = append(p.faults, event.ExceptionDetails.Text)
	case *log.EventEntryAdded:
		if event.Entry.Level == log.EntryLevelError {
			p.faults = append(p.faults, event.Entry.Text)
		}
	case *runtime.EventConsoleAPICalled:
		if event.Type == runtime.ConsoleAPICalledTypeError {
			p.faults = append(p.faults, "console.error was called")
		}
	case *network.EventRequestWillBeSent:
		scheme, _, _ := strings.Cut(event.Request.URL, ":")
		if scheme != "file" && scheme != "blob" && scheme != "data" {
			p.requests = append(p.requests, event.Request.URL)
		}
	}
}

// check reports what went wrong in the page, and what it asked the network for.
func (p *tab) check(t *testing.T) {
	t.Helper()
	p.lock.Lock()
	defer p.lock.Unlock()
	for _, fault := range p.faults {
		t.Errorf("the console shows an error: %s", fault)
	}
	for _, request := range p.requests {
		t.Errorf("the page asked the network for %s", request)
	}
}

func (p *tab) do(t *testing.T, actions ...chromedp.Action[chromedp.Void]) {
	t.Helper()
	limited, cancel := context.WithTimeout(p, time.Minute)
	defer cancel()
	at := context.Context(p)
	if len(actions) > 0 { // the first call opens the tab, which ends with its context
		at = limited
	}
	if err := chromedp.Do(at, actions...); err != nil {
		t.Fatal(err)
	}
}

// read evaluates an expression of JavaScript.
func read[T any](t *testing.T, p *tab, expression string) T {
	t.Helper()
	value, err := chromedp.Run(p, chromedp.Evaluate[T](expression))
	if err != nil {
		t.Fatalf("%s: %v", expression, err)
	}
	return value
}

// wait waits until an expression is true.
func (p *tab) wait(t *testing.T, expression string) {
	t.Helper()
	for began := time.Now(); !read[bool](t, p, expression); time.Sleep(10 * time.Millisecond) {
		if time.Since(began) > 2*time.Minute {
			t.Fatalf("%s: not within two minutes; the console: %q", expression, p.faults)
		}
	}
}

func (p *tab) scheme(t *testing.T, name string) {
	t.Helper()
	command(t, p, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}})
}

// tooWide is how many pixels of a page lie beyond the window.
const tooWide = `document.documentElement.scrollWidth - innerWidth`

func (p *tab) viewport(t *testing.T, width, height int64) {
	t.Helper()
	p.do(t, chromedp.EmulateViewport(width, height))
	// Charts follow the window a little later. What is too wide after 20 seconds is for the caller to report.
	for began := time.Now(); read[float64](t, p, tooWide) > 0 && time.Since(began) < 20*time.Second; {
		time.Sleep(10 * time.Millisecond)
	}
}

// narrow reports content that is wider than a phone.
func (p *tab) narrow(t *testing.T) {
	t.Helper()
	p.viewport(t, 390, 844)
	if over := read[float64](t, p, tooWide); over > 0 {
		t.Errorf("on a phone, the page is %v pixels too wide", over)
	}
}

// picture writes a picture of what the tab shows, where pictures are asked for.
func (p *tab) picture(t *testing.T, name string) {
	t.Helper()
	if *pictures == "" {
		return
	}
	time.Sleep(time.Second) // charts are drawn with an animation
	shot, err := chromedp.Run(p, chromedp.CaptureScreenshot())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(*pictures, name), shot, 0o644); err != nil {
		t.Fatal(err)
	}
}

// fullPicture writes a picture of the whole page, where details are asked for.
func (p *tab) fullPicture(t *testing.T, name string) {
	t.Helper()
	if *details == "" {
		return
	}
	time.Sleep(time.Second) // charts are drawn with an animation
	shot, err := chromedp.Run(p, chromedp.FullScreenshot(100))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(*details, name), shot, 0o644); err != nil {
		t.Fatal(err)
	}
}

// late fails a test for a time, unless others keep this host busy: then it is skipped with the time.
func late(t *testing.T, format string, values ...any) {
	t.Helper()
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		t.Fatal(err)
	}
	load, err := strconv.ParseFloat(strings.Fields(string(text))[0], 64)
	if err != nil {
		t.Fatal(err)
	}
	if most := 2 * float64(goruntime.NumCPU()); load > most {
		t.Skipf(format+"; the host is busy (load %.1f), so the time is not held against the page",
			append(values, load)...)
	}
	t.Errorf(format, values...)
}

// run runs the program in a folder. HOME is that of a user without a host profile.
func run(t *testing.T, folder string, arguments ...string) (stdout, stderr string, code int) {
	t.Helper()
	path, err := filepath.Abs(*program)
	if err != nil {
		t.Fatal(err)
	}
	var out, errors strings.Builder
	command := exec.Command(path, arguments...)
	command.Dir, command.Stdout, command.Stderr = folder, &out, &errors
	command.Env = []string{"HOME=" + t.TempDir()}
	if err := command.Run(); command.ProcessState == nil {
		t.Fatal(err)
	}
	return out.String(), errors.String(), command.ProcessState.ExitCode()
}
