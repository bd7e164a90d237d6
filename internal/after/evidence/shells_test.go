package evidence

import "testing"

// TestForeignSignals: the word for a signal counts as a shell writes it, and not as the beginning of any text.
func TestForeignSignals(t *testing.T) {
	for line, want := range map[string]int{
		"Getötet":                            SIGKILL,
		"./a.sh: Zeile 3: 77 Getötet   x":    SIGKILL,
		"[1]+  77 Beendet                 x": SIGTERM,
		"段错误（核心已转储）":                         SIGSEGV,
		"Getötet   python x.py":              0, // no shell writes a command behind the word alone
		"Getötet wurden 3 Prozesse":          0,
		"Beendet":                            0, // a usual word of programs
		"中止":                                 0,
	} {
		got := 0
		for _, f := range readText(t, "log", []byte(line+"\n")).Findings {
			if end, ok := f.Fact.(ProcessEnded); ok && end.By == "shell" {
				got = end.Signal
			}
		}
		if got != want {
			t.Errorf("%s: signal %d, expected %d", line, got, want)
		}
	}
}
