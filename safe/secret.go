package safe

import (
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
)

// Redacted stands for a secret.
const Redacted = "[redacted]"

var secretsShown atomic.Bool

// ShowSecrets leaves secrets in all that this process shows from now on.
func ShowSecrets() { secretsShown.Store(true) }

// forms match values that are secrets by their form. What the first group of one matches stays.
var forms = []*regexp.Regexp{
	regexp.MustCompile(`\b(hf_|api_org_)[A-Za-z0-9]{16,}`),                    // huggingface.co
	regexp.MustCompile(`\b(gh[pousr]_|github_pat_|glpat-)[A-Za-z0-9_-]{16,}`), // GitHub, GitLab
	regexp.MustCompile(`\b(AKIA|ASIA)[0-9A-Z]{16}\b`),                         // access keys of AWS
	regexp.MustCompile(`\b(sk-|sk_live_|nvapi-|pypi-|xox[abposr]-|wandb_v1_)[A-Za-z0-9_-]{16,}`),
	regexp.MustCompile(`\b(AIza)[A-Za-z0-9_-]{30,}`), // Google
	// JSON Web Tokens, RFC 7519.
	regexp.MustCompile(`\b(ey)J[A-Za-z0-9_-]{8,}\.ey[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+`),
	regexp.MustCompile(`(?i)\b(bearer |basic )[A-Za-z0-9._~+/=-]{16,}`),               // RFC 6750 and RFC 7617
	regexp.MustCompile(`(://[^/\s:@"]*:)[^/\s@"]+@`),                                  // a password in an address, RFC 3986
	regexp.MustCompile(`(-----BEGIN [A-Z ]*PRIVATE KEY-----)(?:[A-Za-z0-9+/=\s\\]+)`), // RFC 7468
}

// assignment matches a name, what stands between it and its value, and the value: of a shell, a configuration or JSON.
// A name may be an option, whose value is the next word.
var assignment = regexp.MustCompile(
	`(?:^|[\s"'{(\[,;?&])(--?[A-Za-z][\w.-]*|[A-Za-z][\w.-]*)("?\s*[=:]\s*"?|'\s*:\s*'|[ \t]+|",\s*")([^\s"',;&|)}\]]+)`)

// redact returns a text without secrets.
func redact(text string) string {
	if secretsShown.Load() {
		return text
	}
	for _, form := range forms {
		text = form.ReplaceAllString(text, "${1}"+Redacted)
	}
	return assigned(text)
}

// assigned redacts the values of names that say that they are secret. Values may themselves be names of values, as in
// "--token --epochs 3", so the search goes on behind the name alone.
func assigned(text string) string {
	var b strings.Builder
	for {
		at := assignment.FindStringSubmatchIndex(text)
		if at == nil {
			b.WriteString(text)
			return b.String()
		}
		name, between, value := text[at[2]:at[3]], text[at[4]:at[5]], text[at[6]:at[7]]
		isOption := strings.HasPrefix(name, "-")
		if (isOption || strings.ContainsAny(between, "=:")) && isSecretName(name) && isSecretValue(name, value) {
			b.WriteString(text[:at[5]] + Redacted)
			text = text[at[7]:]
			continue
		}
		b.WriteString(text[:at[3]])
		text = text[at[3]:]
	}
}

// Words of names. A name that has one of always is of a secret. One that ends in a word of lasts is, if the word before
// it is a key of the map, and "token" alone is, too: "pad_token" and "sort_key" are none.
var (
	always = []string{"password", "passwd", "passphrase", "secret", "credential", "credentials", "apikey"}
	lasts  = map[string][]string{
		"token": {"", "hub", "hf", "auth", "access", "api", "bearer", "refresh", "session", "github", "gitlab", "wandb",
			"security", "huggingface", "comet", "neptune", "clearml"},
		"key": {"api", "access", "private", "wandb", "encryption", "account", "license", "signing"},
	}
)

// isSecretName reports whether a name says that its value is secret.
func isSecretName(name string) bool {
	words := strings.FieldsFunc(strings.ToLower(name), func(r rune) bool { return strings.ContainsRune("-_.", r) })
	if len(words) == 0 {
		return false
	}
	if slices.ContainsFunc(words, func(w string) bool { return slices.Contains(always, w) }) {
		return true
	}
	before := ""
	if len(words) > 1 {
		before = words[len(words)-2]
	}
	return slices.Contains(lasts[words[len(words)-1]], before)
}

// isSecretValue reports whether a value can be a secret: not a switch, a reference to a variable, or another option. A
// token or key has no less than eight characters.
func isSecretValue(name, value string) bool {
	switch strings.ToLower(value) {
	case "true", "false", "none", "null", "yes", "no", "auto", strings.ToLower(Redacted):
		return false
	}
	if strings.HasPrefix(value, "$") || strings.HasPrefix(value, "-") || strings.Contains(value, "[redacted") {
		return false
	}
	lower := strings.ToLower(name)
	return !strings.HasSuffix(lower, "token") && !strings.HasSuffix(lower, "key") || len(value) >= 8
}
