package explain

import (
	"strings"

	"plimsoll/internal/base/lazyregexp"
)

// remedyText are the beginnings of sentences with which messages propose a change.
var remedyText = lazyregexp.New(`(?i)^(?:please |you (?:can|may|need to) |try |use |consider |increas|decreas|reduc|lower |` +
	`set |to (?:adjust|fix|avoid|disable|increase) |if \S+ .*\btry )`)

// noRemedy are sentences that only ask for a report, or name a document.
var noRemedy = lazyregexp.New(`(?i)\b(?:report|file an issue|see also|refer to|documentation|ray logs)\b`)

// longestRemedy is the length of a remedy that is shown, in bytes.
const longestRemedy = 240

// remedyOf returns what the message of a claim proposes itself, or "". PyTorch proposes to mend fragmentation whatever
// the cause is.
func remedyOf(top claim) string {
	for _, sentence := range strings.Split(top.at.Text, ". ") {
		sentence = strings.TrimSuffix(strings.TrimSpace(sentence), ".")
		if len(sentence) > longestRemedy || !remedyText.MatchString(sentence) || noRemedy.MatchString(sentence) {
			continue
		}
		if strings.Contains(sentence, "fragmentation") && top.detail != "fragmentation" {
			continue
		}
		return sentence
	}
	return ""
}
