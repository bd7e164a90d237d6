//go:build linux

package view

import (
	"context"
	"io"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	tea "charm.land/bubbletea/v2"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"plimsoll/internal/base/samples"
)

// Config is what a view needs.
type Config struct {
	Terminal *os.File // to draw on
	Leave    string   // what the key q does, for the help
	// Stdout and Stderr are where lines of ranks go when the view is closed, or the user has left it: the last ones,
	// and all that follow. They are nil for lines that the user sees without the view.
	Stdout, Stderr io.Writer
	// Messages returns what plimsoll has said since the last call. It is nil if nothing does.
	Messages func() []string
}

// View draws a state on a terminal until it is closed. Its methods may be called by any goroutine.
type View struct {
	config  Config
	program *tea.Program
	closing context.Context
	close   context.CancelFunc
	left    chan struct{} // closed when the terminal is restored

	lock     sync.Mutex
	state    State
	changed  bool // since it was drawn
	released bool // the terminal is as it was, for a while
}

// CanDraw reports whether a file is the terminal of this process, and can draw a view.
func CanDraw(file *os.File) bool {
	return term.IsTerminal(int(file.Fd())) && group(file) > 0 && os.Getenv("TERM") != "dumb"
}

// group returns the foreground process group of a terminal, or 0 if it is not that of this process.
func group(terminal *os.File) int {
	found, err := unix.IoctlGetInt(int(terminal.Fd()), unix.TIOCGPGRP)
	if err != nil {
		return 0
	}
	return found
}

// foregroundPeriod is how often a view in the background looks whether it may draw.
const foregroundPeriod = 200 * time.Millisecond

// Open begins to draw as soon as this process is in the foreground.
func Open(c Config) (*View, error) {
	input, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	v := &View{config: c, left: make(chan struct{})}
	v.closing, v.close = context.WithCancel(context.Background())
	v.program = tea.NewProgram(&screen{view: v, stops: make(chan os.Signal, 1)}, tea.WithInput(input),
		tea.WithOutput(c.Terminal), tea.WithoutSignalHandler(), tea.WithFPS(10))
	go func() {
		defer close(v.left)
		defer input.Close()
		if v.awaitForeground() {
			_, _ = v.program.Run() // a terminal that is gone shows nothing: the job goes on
		}
	}()
	go v.follow()
	return v, nil
}

// awaitForeground reports whether this process is in the foreground before the view is closed. A process in the
// background that changes the terminal is stopped.
func (v *View) awaitForeground() bool {
	for group(v.config.Terminal) != unix.Getpgrp() {
		select {
		case <-v.closing.Done():
			return false
		case <-time.After(foregroundPeriod):
		}
	}
	return v.closing.Err() == nil
}

// Add takes the next record. It never waits for the terminal.
func (v *View) Add(r *samples.Record) {
	v.lock.Lock()
	defer v.lock.Unlock()
	v.state.Add(r)
	v.changed = true
}

// Left is closed when the user has left the view, or it is closed, and the terminal is as it was.
func (v *View) Left() <-chan struct{} { return v.left }

// lastWait is how long Close waits for a terminal that does not take what is written.
const lastWait = 2 * time.Second

// Close restores the terminal, and prints the last lines.
func (v *View) Close() {
	v.close()
	v.lock.Lock()
	released := v.released // the terminal is the shell's
	v.lock.Unlock()
	if !released {
		go v.program.Quit() // waits if the program has not begun
		select {
		case <-v.left:
		case <-time.After(lastWait):
		}
	}
	v.print()
}

// follow prints the lines of ranks after the user has left the view.
func (v *View) follow() {
	select {
	case <-v.left:
	case <-v.closing.Done():
		return
	}
	for v.closing.Err() == nil {
		v.print()
		time.Sleep(redrawPeriod)
	}
}

// print prints the lines and the messages that were not printed yet.
func (v *View) print() {
	v.takeMessages()
	v.lock.Lock()
	defer v.lock.Unlock()
	to := map[string]io.Writer{"stdout": v.config.Stdout, "stderr": v.config.Stderr}
	for _, l := range v.state.unprinted() {
		if out := to[l.stream]; out != nil {
			_, _ = io.WriteString(out, v.state.labelled(l)+"\n")
		}
	}
	if v.config.Stderr != nil {
		_, _ = io.WriteString(v.config.Stderr, strings.Join(append(v.state.messages, ""), "\n"))
	}
	v.state.messages = nil
}

// screen is the model of the program.
type screen struct {
	view   *View
	stops  chan os.Signal // each SIGTSTP
	screen Screen
	drawn  string // the state, on this screen:
	on     Screen
}

// redraw is a look at the state: whether it has changed.
type redraw struct{}

const redrawPeriod = 250 * time.Millisecond

func tick() tea.Cmd { return tea.Tick(redrawPeriod, func(time.Time) tea.Msg { return redraw{} }) }

// Init starts to look at the state.
func (c *screen) Init() tea.Cmd {
	c.screen.Keys, c.screen.Leave = "q leave   l lines   ↑ ↓ scroll   ? help", c.view.config.Leave
	if !signal.Ignored(syscall.SIGTSTP) {
		signal.Notify(c.stops, syscall.SIGTSTP)
	}
	return tea.Batch(tick(), c.awaitStop)
}

// stopped is a request to stop, by a signal.
type stopped struct{}

// awaitStop waits for a SIGTSTP.
func (c *screen) awaitStop() tea.Msg {
	select {
	case <-c.stops:
		return stopped{}
	case <-c.view.closing.Done():
		return nil
	}
}

// Update takes a key, a size or the next look at the state.
func (c *screen) Update(m tea.Msg) (tea.Model, tea.Cmd) {
	switch m := m.(type) {
	case tea.WindowSizeMsg:
		c.screen.Width, c.screen.Height = m.Width, m.Height
	case redraw:
		c.view.takeMessages()
		return c, tick()
	case stopped:
		return c, c.suspend
	case resumed:
		return c, c.awaitStop
	case tea.KeyPressMsg:
		return c, c.key(m.String())
	}
	return c, nil
}

func (v *View) takeMessages() {
	if v.config.Messages == nil {
		return
	}
	v.lock.Lock()
	defer v.lock.Unlock()
	for _, text := range v.config.Messages() {
		v.state.say(text)
		v.changed = true
	}
}

// key does what a key asks for. Keys that send signals on any other terminal do so here: the terminal is raw.
func (c *screen) key(key string) tea.Cmd {
	s := &c.screen
	page := max(1, s.Height/2)
	switch key {
	case "q":
		return tea.Quit
	case "ctrl+c":
		_ = syscall.Kill(0, syscall.SIGINT)
	case "ctrl+\\":
		_ = syscall.Kill(0, syscall.SIGQUIT)
	case "ctrl+z":
		_ = syscall.Kill(0, syscall.SIGTSTP)
	case "l":
		s.toggle(Lines)
	case "?", "h":
		s.toggle(Help)
	case "esc":
		s.Pane, s.Scroll = Table, 0
	case "up", "k":
		s.move(-1)
	case "down", "j":
		s.move(1)
	case "pgup":
		s.move(-page)
	case "pgdown", "space":
		s.move(page)
	case "home", "g":
		s.move(-1 << 20)
	case "end", "G":
		s.move(1 << 20)
	}
	return nil
}

// toggle shows a pane, or the table if the pane is shown.
func (s *Screen) toggle(pane Pane) {
	if s.Pane == pane {
		pane = Table
	}
	s.Pane, s.Scroll = pane, 0
}

// move scrolls. Last lines are counted from the end.
func (s *Screen) move(rows int) {
	if s.Pane == Lines {
		rows = -rows
	}
	s.Scroll = max(0, s.Scroll+rows)
}

// View draws the screen.
func (c *screen) View() tea.View {
	c.view.lock.Lock()
	defer c.view.lock.Unlock()
	c.screen.Scroll = min(c.screen.Scroll, c.view.state.mostScroll(c.screen.Pane))
	if c.view.changed || c.on != c.screen {
		c.drawn, c.on, c.view.changed = strings.Join(c.view.state.Render(c.screen), "\n"), c.screen, false
	}
	drawn := tea.NewView(c.drawn)
	drawn.AltScreen = true
	return drawn
}

// mostScroll is the number of lines of a pane.
func (s *State) mostScroll(pane Pane) int {
	if pane == Lines {
		return len(s.lines) + len(s.messages)
	}
	n := len(s.rows)
	if s.sample != nil {
		n += len(s.sample.GPUs) + 3
	}
	return n
}

// resumed says that the view draws again.
type resumed struct{}

// suspend stops this process as Ctrl-Z does: with the terminal as it was before. It draws again when this process is in
// the foreground.
func (c *screen) suspend() tea.Msg {
	v := c.view
	v.setReleased(true)
	if err := v.program.ReleaseTerminal(); err != nil {
		return resumed{}
	}
	continued := make(chan os.Signal, 1)
	signal.Notify(continued, syscall.SIGCONT)
	defer signal.Stop(continued)
	if canBeContinued() {
		_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
		<-continued
	}
	if v.awaitForeground() && v.program.RestoreTerminal() == nil {
		v.setReleased(false)
	}
	return resumed{}
}

func (v *View) setReleased(released bool) {
	v.lock.Lock()
	defer v.lock.Unlock()
	v.released = released
}

// canBeContinued reports whether the parent is a shell with job control. The kernel, too, stops only jobs of such a
// shell at Ctrl-Z.
func canBeContinued() bool {
	parent, errParent := unix.Getsid(os.Getppid())
	own, errOwn := unix.Getsid(0)
	group, err := unix.Getpgid(os.Getppid())
	return errParent == nil && errOwn == nil && err == nil && parent == own && group != unix.Getpgrp()
}
