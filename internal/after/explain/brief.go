package explain

import (
	"fmt"
	"strings"
)

// longestBrief is the number of lines of the short form.
const longestBrief = 12

// Brief returns a short form for the end of a run: the answer, what proves it, who held the bytes, what to change and
// what to collect.
func (e *Explanation) Brief() []string {
	lines := []string{fmt.Sprintf("%s (%s)", e.Cause.Text, confidenceWords[e.Confidence])}
	for _, f := range e.Evidence[:min(len(e.Evidence), 3)] {
		lines = append(lines, "evidence: "+f.Says)
	}
	if len(e.Victims) > 0 {
		ranks := make([]string, len(e.Victims))
		for i, v := range e.Victims {
			ranks[i] = fmt.Sprint(v.Rank)
		}
		lines = append(lines, "because of it also ended: rank "+strings.Join(ranks, ", "))
	}
	for _, h := range e.Holders[:min(len(e.Holders), 2)] {
		lines = append(lines, fmt.Sprintf("held: %v, %s", h.Bytes, h.Text))
	}
	for _, edit := range e.Edits[:min(len(e.Edits), 2)] {
		if edit.Planned != nil {
			lines = append(lines, fmt.Sprintf("change: %v frees %v; %s", edit.Planned, edit.Frees, edit.Why))
			continue
		}
		lines = append(lines, fmt.Sprintf("change: %s to %s; %s", edit.Key, edit.To, edit.Why))
	}
	for _, c := range e.Collect[:min(len(e.Collect), 2)] {
		lines = append(lines, "collect: "+c.Command)
	}
	return lines[:min(len(lines), longestBrief)]
}

var confidenceWords = map[Confidence]string{Certain: "certain", Likely: "likely", Unknown: "not enough evidence"}
